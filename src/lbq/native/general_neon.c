#if defined(__aarch64__)
#define LBQ_FOR_NEON
#include "general.h"
#endif
