#ifndef LBQ_NEURON_SETS_H
#define LBQ_NEURON_SETS_H
#include "native.h"

enum { RESET_TO_ONCE, RESET_TO_LEVEL, RESET_TO_HARD };

/* All timesteps of the channels at one site of one image. scratch: 4 * channels. counts: active levels, set bits. */
#define LBQ_NEURON_SITE(suffix)                                                                                 \
    void lbq_neuron_site_##suffix(const struct lbq_neuron *n, int64_t image, int64_t site, int32_t *scratch,    \
                                  int64_t counts[2]);
LBQ_NEURON_SITE(portable)
LBQ_NEURON_SITE(avx2)
LBQ_NEURON_SITE(avx512)
#endif
