/* Divides a sequence of slabs into units of fixed size, runs them on the pool, and adds up what they found. */
#include <stdlib.h>
#include <string.h>

#include "burst_rules.h"

#define UNIT 4096      /* neurons in a unit where one step holds for many */
#define ROW_UNITS 64   /* units where every neighbour has another step: as many arrays of sums */
#define LONGEST 16     /* fewer neighbours than this with the same step are handled element by element */
#define FEW (1 << 14)  /* fewer values than this are not worth waking a thread */
#define MAX_LANES 16

typedef void (*stretch_fn)(const struct lbq_burst *, int, int64_t, int64_t, const float *, const float *, int,
                           double *const[6], float *);

struct plan {
    const struct lbq_burst *call;
    stretch_fn stretch;
    int backward, rows, failed;
    int64_t units;
    int64_t runs, parts;           /* runs of equal step, each cut into parts of at most UNIT */
    int64_t row, rows_each;        /* else rows of channels * inner elements, some to a unit */
    float *row_step, *row_scale;   /* step and scale spread over a row */
    const float *scale;
    double *totals;                /* gradients of step and scale, [channels] each, and of the four scalars */
    double *partial;               /* the same of every unit; forward, what it emitted: [2, 16], lane by lane */
    int64_t partial_each;
};

int lbq_exp(const float *x, float *out, int64_t n, int32_t isa) {
    LBQ_PICK(isa, lbq_exp)(x, out, n);
    return 0;
}

static void run_unit(void *context, int64_t unit) {
    struct plan *p = context;
    const struct lbq_burst *c = p->call;
    float *scratch = malloc((size_t)c->timesteps * 7 * MAX_LANES * sizeof(float));
    if (!scratch) {
        __atomic_store_n(&p->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    double *own = p->partial ? p->partial + unit * p->partial_each : NULL;
    double *sums[6] = {0};
    if (own && !p->backward) sums[0] = own, sums[1] = own + 16;
    if (p->rows) {
        int64_t first = unit * p->rows_each, last = first + p->rows_each;
        if (own && p->backward) {
            sums[0] = own, sums[1] = own + p->row + 16;
            for (int q = 0; q < 4; q++) sums[2 + q] = own + 2 * (p->row + 16) + 16 * q;
        }
        for (int64_t row = first; row < last && row < c->outer; row++)
            p->stretch(c, p->backward, row * p->row, p->row, p->row_step, p->row_scale, 1, sums, scratch);
    } else {
        int64_t run = unit / p->parts, begin = unit % p->parts * UNIT, length = c->outer * c->channels * c->inner / p->runs;
        int64_t n = length - begin < UNIT ? length - begin : UNIT, channel = run % c->channels;
        if (own && p->backward)
            for (int q = 0; q < 6; q++) sums[q] = own + 16 * q;
        p->stretch(c, p->backward, run * length + begin, n, c->step + channel, p->scale + channel, 0, sums, scratch);
    }
    free(scratch);
}

static double lanes_sum(const double *lanes) {
    double total = 0;
    for (int i = 0; i < 16; i++) total += lanes[i];
    return total;
}

static void collect(const struct plan *p) {
    const struct lbq_burst *c = p->call;
    double *by_step = p->totals, *by_scale = by_step + c->channels, *by_scalars = by_scale + c->channels;
    for (int64_t unit = 0; unit < p->units; unit++) {
        const double *own = p->partial + unit * p->partial_each;
        if (p->rows) {
            for (int64_t i = 0; i < p->row; i++) {
                by_step[i / c->inner] += own[i];
                by_scale[i / c->inner] += own[p->row + 16 + i];
            }
            own += 2 * (p->row + 16);
        } else {
            int64_t channel = unit / p->parts % c->channels;
            by_step[channel] += lanes_sum(own);
            by_scale[channel] += lanes_sum(own + 16);
            own += 32;
        }
        for (int q = 0; q < 4; q++) by_scalars[q] += lanes_sum(own + 16 * q);
    }
    for (int64_t i = 0; i < c->channels; i++) {
        c->by_step[i] = (float)(c->scale ? by_step[i] : by_step[i] + by_scale[i]);
        c->by_scale[i] = (float)by_scale[i];
    }
    for (int q = 0; q < 4; q++) c->by_scalars[q] = (float)by_scalars[q];
}

static void collect_emitted(const struct plan *p) {
    double sizes = 0, bits = 0;
    for (int64_t unit = 0; unit < p->units; unit++) {
        sizes += lanes_sum(p->partial + unit * p->partial_each);
        bits += lanes_sum(p->partial + unit * p->partial_each + 16);
    }
    p->call->by_level[0] = (float)sizes, p->call->by_level[1] = (float)bits;
}

static float number(const float *at) { return at ? *at : 1; }

static int run(struct lbq_burst own, int backward) {
    const struct lbq_burst *c = &own;
    own.tail = number(own.tail_at), own.leak = number(own.leak_at);
    own.alpha = number(own.alpha_at), own.gain = number(own.gain_at);
    struct plan p = {.call = c, .stretch = LBQ_PICK(c->isa, lbq_burst_stretch), .backward = backward};
    int64_t slab = c->outer * c->channels * c->inner;
    p.scale = c->scale ? c->scale : c->step;
    p.rows = c->channels != 1 && c->inner < LONGEST;
    if (p.rows) {
        p.row = c->channels * c->inner;
        p.rows_each = c->outer / ROW_UNITS + 1;
        p.units = (c->outer + p.rows_each - 1) / p.rows_each;
        p.partial_each = 2 * (p.row + 16) + 64;
        p.row_step = malloc((size_t)(p.row + 1) * sizeof(float));
        p.row_scale = malloc((size_t)(p.row + 1) * sizeof(float));
        if (!p.row_step || !p.row_scale) p.failed = 1;
        for (int64_t i = 0; i < p.row && !p.failed; i++) {
            p.row_step[i] = c->step[i / c->inner];
            p.row_scale[i] = p.scale[i / c->inner];
        }
    } else {
        p.runs = c->channels != 1 ? c->outer * c->channels : 1;
        p.parts = p.runs ? (slab / p.runs + UNIT - 1) / UNIT : 0;
        p.units = p.runs * p.parts;
        p.partial_each = 96;
    }
    if (!backward) p.partial_each = 32;
    if ((backward || c->by_level) && !p.failed) {
        p.totals = calloc((size_t)(2 * c->channels + 4), sizeof(double));
        p.partial = calloc((size_t)(p.units * p.partial_each + 1), sizeof(double));
        if (!p.totals || !p.partial) p.failed = 1;
    }
    if (!p.failed) lbq_parallel(slab * c->timesteps < FEW ? 1 : c->threads, p.units, run_unit, &p);
    if (backward && !p.failed) collect(&p);
    if (!backward && c->by_level && !p.failed) collect_emitted(&p);
    free(p.row_step), free(p.row_scale), free(p.totals), free(p.partial);
    return p.failed;
}

int lbq_burst_forward(const struct lbq_burst *call) { return run(*call, 0); }
int lbq_burst_backward(const struct lbq_burst *call) { return run(*call, 1); }
