#if defined(__x86_64__) || defined(__i386__)
#define LBQ_FOR_AVX2
#include "general.h"
#endif
