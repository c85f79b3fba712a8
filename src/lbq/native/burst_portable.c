#define LBQ_FOR_PORTABLE
#include "burst.h"
