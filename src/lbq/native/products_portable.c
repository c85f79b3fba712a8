#define LBQ_FOR_PORTABLE
#include "products.h"
