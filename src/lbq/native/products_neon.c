#if defined(__aarch64__)
#define LBQ_FOR_NEON
#include "products.h"
#endif
