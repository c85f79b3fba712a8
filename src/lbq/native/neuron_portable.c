#define LBQ_FOR_PORTABLE
#include "neuron.h"
