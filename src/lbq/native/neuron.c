/* Integer neurons over a sequence: additions, shifts and comparisons on int32 (the leak's product on int64).
 *
 *     U = leak(V) + (current << f) + bias + sum of identity * S + sum of w * product - delayed reset
 *     S = thresholds that U reaches
 *     V = U - reset * [S > 0]  (times S; or 0 where S > 0)
 *
 * The bounds that deployment proves keep every sum within int32. */
#include "neuron_sets.h"

struct run {
    struct lbq_neuron n;
    int64_t sites_each;
};

static void run_unit(void *context, int64_t unit) {
    const struct run *r = context;
    const struct lbq_neuron *n = &r->n;
    int64_t total = n->batch * n->sites, first = unit * r->sites_each, last = first + r->sites_each;
    int64_t counts[2] = {0, 0};
    LBQ_PICK(n->isa, lbq_neuron_sites)(n, first, last < total ? last : total, counts);
    for (int i = 0; i < 2; i++) __atomic_fetch_add(&n->counts[i], counts[i], __ATOMIC_RELAXED);
}

void lbq_neuron(const struct lbq_neuron *call, int threads) {
    struct run r = {.n = *call};
    int64_t total = r.n.batch * r.n.sites;
    r.n.counts[0] = r.n.counts[1] = 0;
    if (total == 0 || r.n.channels == 0) return;
    while (r.n.leak_k > 1 && r.n.leak_m % 2 == 0) r.n.leak_m /= 2, r.n.leak_k--; /* the same number, often 1 / 2^k */
    r.sites_each = (1 << 14) / r.n.channels + 1;
    lbq_parallel(threads, (total + r.sites_each - 1) / r.sites_each, run_unit, &r);
}

int lbq_tally(const struct lbq_tally *call) {
    return LBQ_PICK(call->isa, lbq_tally_sites)(call, 0, call->timesteps * call->sites);
}
