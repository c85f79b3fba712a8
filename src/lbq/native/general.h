/* The template of general.c: one row of output pixels. */
#include <string.h>

#include "isa.h"
#include "general_sets.h"

typedef uint32_t vi __attribute__((vector_size(4 * LANES))); /* sums wrap where lanes belong to another group */
typedef int16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vs __attribute__((vector_size(LANES)));

INLINE vi weights_at(const int16_t *p) {
    vh v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vi);
}

INLINE vi levels_at(const uint8_t *p, int is_signed) {
    vb v;
    memcpy(&v, p, sizeof v);
    vh wide = is_signed ? __builtin_convertvector((vs)v, vh) : __builtin_convertvector(v, vh); /* gcc 12 knows no 8 to 32 bits */
    return __builtin_convertvector(wide, vi);
}

/* The first `some` of them: all lanes, but for the last outputs of a group. */
INLINE void store(int32_t *p, vi v, int64_t some) {
    if (some >= LANES) memcpy(p, &v, sizeof v);
    else memcpy(p, &v, (size_t)some * sizeof *p);
}

INLINE int32_t level_of(uint8_t level, int is_signed) { return is_signed ? (int8_t)level : level; }

/* The taps that meet the image at output pixel x; returns how many. */
INLINE int64_t taps_at(const struct lbq_general_row *r, int64_t x) {
    const struct lbq_general *p = r->call;
    int64_t count = 0, size = p->inputs / p->groups * p->outputs;
    for (int64_t ky = 0; ky < p->kh; ky++) {
        int64_t in_y = r->y * p->stride_y - p->pad_y + ky * p->dilation_y;
        for (int64_t kx = 0; kx < p->kw && in_y >= 0 && in_y < p->height; kx++) {
            int64_t in_x = x * p->stride_x - p->pad_x + kx * p->dilation_x;
            if (in_x < 0 || in_x >= p->width) continue;
            r->taps[count].levels = r->image + (in_y * p->width + in_x) * p->inputs;
            r->taps[count++].weights = p->weights + (ky * p->kw + kx) * size;
        }
    }
    return count;
}

/* One input and one output in each group: channels go side by side. */
INLINE void channels_apart(const struct lbq_general_row *r, int64_t taps, int is_signed, int32_t *out) {
    int64_t c = 0, channels = r->call->outputs;
    for (; c + LANES <= channels; c += LANES) {
        vi sum = {0};
        for (int64_t i = 0; i < taps; i++) sum += levels_at(r->taps[i].levels + c, is_signed) * weights_at(r->taps[i].weights + c);
        store(out + c, sum, LANES);
    }
    for (; c < channels; c++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < taps; i++) sum += level_of(r->taps[i].levels[c], is_signed) * r->taps[i].weights[c];
        out[c] = sum;
    }
}

/* out = sum of numbers times rows. Weights behind a row may be read, and what they give is not stored. */
INLINE void combine(const int32_t *numbers, const int16_t *const *rows, int64_t n, int64_t width, int32_t *out) {
    int64_t e = 0;
    for (; e + 4 * LANES <= width; e += 4 * LANES) {
        vi sums[4] = {{0}};
        for (int64_t i = 0; i < n; i++)
            for (int j = 0; j < 4; j++) sums[j] += weights_at(rows[i] + e + j * LANES) * (uint32_t)numbers[i];
        for (int j = 0; j < 4; j++) store(out + e + j * LANES, sums[j], LANES);
    }
    for (; e < width; e += LANES) {
        vi sum = {0};
        for (int64_t i = 0; i < n; i++) sum += weights_at(rows[i] + e) * (uint32_t)numbers[i];
        store(out + e, sum, width - e);
    }
}

/* By multiplication; zeros are passed over where groups have several weights for an input. */
void NAME(lbq_general_dense)(const struct lbq_general_row *row) {
    const struct lbq_general_row own = *row, *r = &own;
    const struct lbq_general *p = r->call;
    int64_t inputs = p->inputs / p->groups, width = p->outputs / p->groups;
    for (int64_t x = 0; x < p->out_width; x++) {
        int64_t taps = taps_at(r, x);
        int32_t *out = r->out + x * p->outputs;
        if (inputs == 1 && width == 1) {
            if (p->is_signed) channels_apart(r, taps, 1, out);
            else channels_apart(r, taps, 0, out);
            continue;
        }
        for (int64_t g = 0; g < p->groups; g++) {
            int64_t n = 0;
            for (int64_t i = 0; i < taps; i++)
                for (int64_t c = 0; c < inputs; c++) {
                    const uint8_t *at = r->taps[i].levels + g * inputs + c;
                    uint64_t eight = 1;
                    if (c + 8 <= inputs) memcpy(&eight, at, 8);
                    if (!eight) { /* most are 0: eight are passed over at a time */
                        c += 7;
                        continue;
                    }
                    r->numbers[n] = level_of(*at, p->is_signed);
                    r->rows[n] = r->taps[i].weights + c * p->outputs + g * width;
                    n += *at != 0;
                }
            combine(r->numbers, r->rows, n, width, out + g * width);
        }
    }
}

/* Rows that set bits add: planes from the highest down, doubled on the way. */
INLINE void combine_planes(const struct lbq_general_row *r, const int64_t *found, int64_t room, int64_t width, int32_t *out) {
    for (int64_t e = 0; e < width; e += LANES) {
        vi sum = {0};
        for (int k = r->call->planes - 1; k >= 0; k--) {
            sum += sum;
            for (int64_t i = k * room; i < k * room + found[k]; i++) {
                vi more = weights_at(r->rows[i] + e);
                sum = r->numbers[i] < 0 ? sum - more : sum + more;
            }
        }
        store(out + e, sum, width - e);
    }
}

/* By the set bits of levels: each adds its weights. */
void NAME(lbq_general_planes)(const struct lbq_general_row *row, int64_t counts[2]) {
    const struct lbq_general_row own = *row, *r = &own;
    const struct lbq_general *p = r->call;
    int64_t inputs = p->inputs / p->groups, width = p->outputs / p->groups, room = p->kh * p->kw * inputs;
    for (int64_t x = 0; x < p->out_width; x++) {
        int64_t taps = taps_at(r, x);
        for (int64_t g = 0; g < p->groups; g++) {
            int64_t found[LBQ_LEVEL_BITS] = {0};
            for (int64_t i = 0; i < taps; i++)
                for (int64_t c = 0; c < inputs; c++) {
                    int32_t level = level_of(r->taps[i].levels[g * inputs + c], p->is_signed);
                    for (uint32_t bits = (uint32_t)(level < 0 ? -level : level); bits; bits &= bits - 1) {
                        int k = __builtin_ctz(bits);
                        int64_t at = k * room + found[k]++;
                        r->numbers[at] = level < 0 ? -1 : 1;
                        r->rows[at] = r->taps[i].weights + c * p->outputs + g * width;
                    }
                }
            for (int k = 0; k < p->planes; k++) counts[0] += found[k] * width, counts[1] += k ? found[k] * width : 0;
            combine_planes(r, found, room, width, r->out + x * p->outputs + g * width);
        }
    }
}
LBQ_END
