/* Convolutions that conv.c is not made for: with groups or dilation, or with very many weights or pixels. */
#include <stdlib.h>

#include "general_sets.h"

static void count(int64_t *total, int64_t more) { __atomic_fetch_add(total, more, __ATOMIC_RELAXED); }

struct run {
    const struct lbq_general *call;
    int failed;
};

static void row_unit(void *context, int64_t unit) {
    struct run *r = context;
    const struct lbq_general *p = r->call;
    int64_t image = unit / p->out_height, taps = p->kh * p->kw, room = taps * (p->inputs / p->groups);
    struct lbq_general_row row = {.call = p, .image = p->levels + image * p->height * p->width * p->inputs,
                                  .y = unit % p->out_height, .out = p->out + unit * p->out_width * p->outputs};
    size_t listed = (size_t)(room * (p->by_planes ? LBQ_LEVEL_BITS : 1));
    row.taps = malloc((size_t)taps * sizeof *row.taps);
    row.rows = malloc(listed * sizeof *row.rows);
    row.numbers = malloc(listed * sizeof *row.numbers);
    if (!row.taps || !row.rows || !row.numbers) {
        __atomic_store_n(&r->failed, 1, __ATOMIC_RELAXED);
    } else if (p->by_planes) {
        int64_t counts[2] = {0};
        LBQ_PICK(p->isa, lbq_general_planes)(&row, counts);
        count(&p->counts[0], counts[0]), count(&p->counts[2], counts[1]), count(&p->counts[4], counts[0]);
    } else {
        LBQ_PICK(p->isa, lbq_general_dense)(&row);
    }
    free(row.taps), free(row.rows), free(row.numbers);
}

/* Set bits and active inputs of one image. */
static void bits_unit(void *context, int64_t image) {
    const struct lbq_general *p = ((struct run *)context)->call;
    int64_t size = p->height * p->width * p->inputs, formed = 0, active = 0;
    for (int64_t i = image * size; i < (image + 1) * size; i++) {
        int32_t level = p->is_signed && p->levels[i] > 127 ? 256 - p->levels[i] : p->levels[i];
        formed += __builtin_popcount((uint32_t)level), active += level != 0;
    }
    count(&p->counts[1], formed), count(&p->counts[3], active);
}

int lbq_general(const struct lbq_general *call, int threads) {
    struct run r = {call, 0};
    for (int i = 0; i < 5; i++) call->counts[i] = 0;
    if (call->by_planes) lbq_parallel(threads, call->batch, bits_unit, &r);
    lbq_parallel(threads, call->batch * call->out_height, row_unit, &r);
    return r.failed;
}
