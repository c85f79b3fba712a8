#define LBQ_FOR_PORTABLE
#include "conv.h"
