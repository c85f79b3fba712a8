#ifndef LBQ_NEURON_SETS_H
#define LBQ_NEURON_SETS_H
#include "native.h"

/* All timesteps of some sites, counted over all images. counts: active levels, set bits.
 * The tally of some sites, counted over all timesteps; not 0 where a level exceeded n_max. */
#define LBQ_NEURON_SITES(suffix) \
    void lbq_neuron_sites_##suffix(const struct lbq_neuron *n, int64_t first, int64_t last, int64_t counts[2]); \
    int lbq_tally_sites_##suffix(const struct lbq_tally *n, int64_t first, int64_t last);
LBQ_NEURON_SITES(portable)
LBQ_NEURON_SITES(avx2)
LBQ_NEURON_SITES(avx512)
LBQ_NEURON_SITES(neon)
#endif
