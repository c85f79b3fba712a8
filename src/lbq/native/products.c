/* Products of levels with levels: attention (Q K^T) V in each head, its scores Q K^T, scores times V, and gates.
 *
 * A product is left right^T, where rows of both are levels of one head, or that times values. The bounds that deployment
 * proves keep every sum within int32, in either order. */
#include <stdlib.h>

#include "product_sets.h"

#define PITCH 16 /* of rows in memory: as many numbers as the widest register has */

static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static void count(int64_t *total, int64_t more) { __atomic_fetch_add(total, more, __ATOMIC_RELAXED); }

static int32_t size_of(uint8_t level, int is_signed) { return is_signed && level > 127 ? 256 - level : level; }

struct run {
    const struct lbq_product *p;
    int32_t (*planes)[3][2]; /* of each image's left, right and values: that hold bits, of positive levels and negative ones */
    int64_t pitch, each;     /* numbers of a row, and bytes of memory that a head needs */
    int failed;
};

static struct lbq_levels operand(const struct lbq_product *p, int which, int64_t image, int64_t head) {
    const uint8_t *const levels[] = {p->left, p->right, p->values};
    const int64_t *const steps[] = {p->left_steps, p->right_steps, p->values_steps}, *by = steps[which];
    const int is_signed[] = {p->left_signed, p->right_signed, p->values_signed};
    return (struct lbq_levels){levels[which] + image * by[0] + head * by[1], by[2], by[3], is_signed[which]};
}

/* Which planes of an image hold bits. */
static void survey_unit(void *context, int64_t image) {
    const struct run *r = context;
    const struct lbq_product *p = r->p;
    const int64_t rows[] = {p->rows, p->columns, p->columns}, widths[] = {p->summed, p->summed, p->width};
    for (int which = 0; which < (p->values ? 3 : 2); which++) {
        uint32_t held[2] = {0, 0};
        for (int64_t h = 0; h < p->heads; h++) {
            struct lbq_levels from = operand(p, which, image, h);
            for (int64_t row = 0; row < rows[which]; row++)
                for (int64_t i = 0; i < widths[which]; i++) {
                    uint8_t level = from.at[row * from.row + i * from.step];
                    held[from.is_signed && level > 127] |= (uint32_t)size_of(level, from.is_signed);
                }
        }
        for (int side = 0; side < 2; side++) {
            int32_t planes = 0;
            while (held[side] >> planes) planes++;
            r->planes[image][which][side] = planes;
        }
    }
}

/* Memory that is handed out piece by piece; without a start it only counts. */
struct room {
    char *start;
    size_t used;
};

static void *take(struct room *room, int64_t n, size_t size) {
    void *piece = room->start ? room->start + room->used : NULL;
    room->used += (size_t)up(n * (int64_t)size, 64);
    return piece;
}

/* Where a head's numbers lie in memory; returns how many bytes they take. */
static size_t arrange(const struct run *r, struct lbq_head *h, char *start) {
    const struct lbq_product *p = r->p;
    struct room room = {start, 0};
    h->row = take(&room, r->pitch, sizeof *h->row);
    h->numbers = take(&room, r->pitch, sizeof *h->numbers);
    h->places = take(&room, r->pitch, sizeof *h->places);
    int64_t values = p->by_planes ? h->value_planes[0] + h->value_planes[1] : 1;
    if (p->values) h->values = take(&room, max64(values, 1) * p->columns * h->width_pitch, sizeof *h->values);
    if (!p->by_planes) {
        h->matrix = take(&room, p->summed * (h->is_linear ? h->width_pitch : h->columns_pitch), sizeof *h->matrix);
        return room.used;
    }
    int64_t words = up(p->summed, 64) / 64;
    h->value_bits = take(&room, p->columns, sizeof *h->value_bits);
    int64_t planes = h->left_planes[0] + h->left_planes[1], others = h->right_planes[0] + h->right_planes[1];
    h->left_words = take(&room, planes * p->rows * words, sizeof *h->left_words);
    h->right_words = take(&room, others * p->columns * words, sizeof *h->right_words);
    return room.used;
}

static void product_unit(void *context, int64_t unit) {
    struct run *r = context;
    const struct lbq_product *p = r->p;
    int64_t image = unit / p->heads, head = unit % p->heads;
    struct lbq_head h = {.left = operand(p, 0, image, head), .right = operand(p, 1, image, head), .rows = p->rows,
                         .columns = p->columns, .summed = p->summed, .width = p->width, .is_linear = p->is_linear,
                         .columns_pitch = up(p->columns, PITCH), .width_pitch = up(p->width, PITCH)};
    if (p->values) h.value = operand(p, 2, image, head);
    h.out = p->out + image * p->out_steps[0] + head * p->out_steps[1];
    h.out_row = p->out_steps[2], h.out_step = p->out_steps[3];
    for (int side = 0; p->by_planes && side < 2; side++) {
        const int32_t (*planes)[2] = (const int32_t (*)[2])r->planes[image];
        h.left_planes[side] = planes[0][side], h.right_planes[side] = planes[1][side], h.value_planes[side] = planes[2][side];
    }
    char *memory = malloc(arrange(r, &h, NULL));
    if (!memory) {
        __atomic_store_n(&r->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    arrange(r, &h, memory);
    if (p->by_planes) {
        int64_t counts[5] = {0};
        LBQ_PICK(p->isa, lbq_product_planes)(&h, counts);
        for (int i = 0; i < 5; i++) count(&p->counts[i], counts[i]);
    } else {
        LBQ_PICK(p->isa, lbq_product_dense)(&h);
    }
    free(memory);
}

int lbq_product(const struct lbq_product *p, int threads) {
    struct run r = {.p = p, .pitch = up(max64(max64(p->rows, p->columns), max64(p->summed, p->width)), PITCH)};
    for (int i = 0; i < 5; i++) p->counts[i] = 0;
    if (p->by_planes) {
        r.planes = calloc((size_t)p->images + 1, sizeof *r.planes);
        if (!r.planes) return 1;
        lbq_parallel(threads, p->images, survey_unit, &r);
    }
    lbq_parallel(threads, p->images * p->heads, product_unit, &r);
    free(r.planes);
    return r.failed;
}

/* Gates
 * ------------------------------------------------------------------------------------------------------------------ */

static void gate_unit(void *context, int64_t image) {
    const struct lbq_gate *g = context;
    int64_t shared = g->channels / g->factor_channels, size = g->sites * g->channels;
    const uint8_t *factors = g->factor + image * g->factor_sites * g->factor_channels;
    const uint8_t *levels = g->levels + image * size;
    uint8_t *out = g->out + image * size;
    for (int64_t site = 0; site < g->sites; site++)
        for (int64_t c = 0; c < g->channels; c += shared) {
            uint8_t factor = factors[(g->factor_sites == 1 ? 0 : site) * g->factor_channels + c / shared];
            for (int64_t i = 0, at = site * g->channels + c; i < shared; i++) /* magnitudes stay in 8 bits, with sign too */
                out[at + i] = (uint8_t)(factor * levels[at + i]);
        }
    if (!g->by_planes) return;
    int64_t added = 0, formed = 0, active = 0;
    for (int64_t i = 0; i < g->factor_sites * g->factor_channels; i++)
        formed += __builtin_popcount((uint32_t)size_of(factors[i], g->factor_signed));
    for (int64_t site = 0; site < g->sites; site++)
        for (int64_t c = 0; c < g->channels; c++) {
            uint8_t factor = factors[(g->factor_sites == 1 ? 0 : site) * g->factor_channels + c / shared];
            int bits = __builtin_popcount((uint32_t)size_of(levels[site * g->channels + c], g->levels_signed));
            int both = bits * __builtin_popcount((uint32_t)size_of(factor, g->factor_signed));
            added += both, formed += bits, active += both != 0;
        }
    count(&g->counts[0], added), count(&g->counts[1], formed), count(&g->counts[2], active);
}

void lbq_gate(const struct lbq_gate *g, int threads) {
    struct lbq_gate own = *g;
    for (int i = 0; i < 3; i++) g->counts[i] = 0;
    lbq_parallel(threads, g->images, gate_unit, &own);
}
