#define LBQ_FOR_PORTABLE
#include "general.h"
