/* Integer neurons over a sequence: additions, shifts and comparisons on int32 (the leak's product on int64).
 *
 *     U = leak(V) + (current << f) + bias + sum of identity * S - delayed reset;  S = thresholds that U reaches
 *     V = U - reset * [S > 0]  (times S; or 0 where S > 0)
 *
 * Plain loops over the channels of one site, which the compiler vectorises; this file is compiled once for each
 * instruction set. The bounds that deployment proves keep every sum within int32. */
#include <stdlib.h>
#include <string.h>

#include "neuron_sets.h"

static void (*site_of(int isa))(const struct lbq_neuron *, int64_t, int64_t, int32_t *, int64_t *) {
#if defined(LBQ_X86)
    if (isa == LBQ_AVX512) return lbq_neuron_site_avx512;
    if (isa == LBQ_AVX2) return lbq_neuron_site_avx2;
#endif
    (void)isa;
    return lbq_neuron_site_portable;
}

struct run {
    const struct lbq_neuron *n;
    int64_t sites_each;
    int failed;
};

static void run_unit(void *context, int64_t unit) {
    struct run *r = context;
    const struct lbq_neuron *n = r->n;
    int64_t total = n->batch * n->sites, end = (unit + 1) * r->sites_each, counts[2] = {0, 0};
    int32_t *scratch = malloc((size_t)(4 * n->channels + 1) * sizeof *scratch);
    if (!scratch) {
        __atomic_store_n(&r->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t site = unit * r->sites_each; site < end && site < total; site++)
        site_of(n->isa)(n, site / n->sites, site % n->sites, scratch, counts);
    free(scratch);
    for (int i = 0; i < 2; i++) __atomic_fetch_add(&n->counts[i], counts[i], __ATOMIC_RELAXED);
}

int lbq_neuron(const struct lbq_neuron *n) {
    struct run r = {.n = n};
    int64_t total = n->batch * n->sites;
    if (total == 0 || n->channels == 0) return 0;
    r.sites_each = (1 << 14) / n->channels + 1;
    lbq_parallel(n->threads, (total + r.sites_each - 1) / r.sites_each, run_unit, &r);
    return r.failed;
}
