/* The template of products.c: one head of one image. Rows of numbers are `pitch` long, a multiple of LANES; what is beyond
 * their width is 0. */
#include <string.h>

#include "isa.h"
#include "product_sets.h"

typedef int32_t vi __attribute__((vector_size(4 * LANES)));

INLINE vi load(const int32_t *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(int32_t *p, vi v) { memcpy(p, &v, sizeof v); }

INLINE int32_t level_of(uint8_t level, int is_signed) { return is_signed ? (int8_t)level : level; }

/* Some numbers and their places in a row: those that are not 0. */
struct some {
    int64_t count;
    int32_t *places, *numbers;
};

INLINE void put(struct some *s, int64_t place, int32_t number) {
    s->places[s->count] = (int32_t)place, s->numbers[s->count] = number;
    s->count += number != 0;
}

INLINE struct some levels_in(const struct lbq_head *h, struct lbq_levels from, int64_t row, int64_t n) {
    struct some s = {0, h->places, h->numbers};
    const uint8_t *at = from.at + row * from.row;
    int64_t i = 0;
    for (; from.step == 1 && i + 8 <= n; i += 8) { /* most are 0: eight are passed over at a time */
        uint64_t eight;
        memcpy(&eight, at + i, 8);
        if (eight)
            for (int j = 0; j < 8; j++) put(&s, i + j, level_of(at[i + j], from.is_signed));
    }
    for (; i < n; i++) put(&s, i, level_of(at[i * from.step], from.is_signed));
    return s;
}

INLINE struct some numbers_in(const struct lbq_head *h, const int32_t *row, int64_t n) {
    struct some s = {0, h->places, h->numbers};
    for (int64_t i = 0; i < n; i++) put(&s, i, row[i]);
    return s;
}

/* out = sum over some of number * matrix[place]. */
INLINE void combine(const int32_t *matrix, int64_t pitch, struct some s, int32_t *out) {
    int64_t e = 0;
    for (; e + 2 * LANES <= pitch; e += 2 * LANES) {
        vi one = {0}, other = {0};
        for (int64_t i = 0; i < s.count; i++) {
            const int32_t *row = matrix + s.places[i] * pitch + e;
            one += load(row) * s.numbers[i], other += load(row + LANES) * s.numbers[i];
        }
        store(out + e, one), store(out + e + LANES, other);
    }
    for (; e < pitch; e += LANES) {
        vi sum = {0};
        for (int64_t i = 0; i < s.count; i++) sum += load(matrix + s.places[i] * pitch + e) * s.numbers[i];
        store(out + e, sum);
    }
}

/* matrix[place] += number * row, for some. */
INLINE void spread(int32_t *matrix, int64_t pitch, struct some s, const int32_t *row) {
    for (int64_t e = 0; e < pitch; e += LANES) {
        vi more = load(row + e);
        for (int64_t i = 0; i < s.count; i++) {
            int32_t *to = matrix + s.places[i] * pitch + e;
            store(to, load(to) + more * s.numbers[i]);
        }
    }
}

/* Levels as rows of numbers, [rows][pitch]. */
INLINE void unpack(struct lbq_levels from, int64_t rows, int64_t n, int64_t pitch, int32_t *out) {
    for (int64_t r = 0; r < rows; r++, out += pitch) {
        const uint8_t *at = from.at + r * from.row;
        if (from.step == 1 && !from.is_signed)
            for (int64_t i = 0; i < n; i++) out[i] = at[i];
        else
            for (int64_t i = 0; i < n; i++) out[i] = level_of(at[i * from.step], from.is_signed);
        memset(out + n, 0, (size_t)(pitch - n) * sizeof *out);
    }
}

/* Rows and columns change places. */
INLINE struct lbq_levels turned(struct lbq_levels from) {
    return (struct lbq_levels){from.at, from.step, from.row, from.is_signed};
}

INLINE void store_row(const struct lbq_head *h, int64_t row, int64_t n) {
    int32_t *out = h->out + row * h->out_row;
    if (h->out_step == 1) memcpy(out, h->row, (size_t)n * sizeof *out);
    else
        for (int64_t i = 0; i < n; i++) out[i * h->out_step] = h->row[i];
}

/* Sums of products of levels, by multiplication; zeros are passed over. */
void NAME(lbq_product_dense)(const struct lbq_head *head) {
    const struct lbq_head own = *head, *h = &own;
    if (h->values) unpack(h->value, h->columns, h->width, h->width_pitch, h->values);
    if (h->is_linear) { /* left (right^T values) */
        memset(h->matrix, 0, (size_t)(h->summed * h->width_pitch) * sizeof *h->matrix);
        for (int64_t c = 0; c < h->columns; c++)
            spread(h->matrix, h->width_pitch, levels_in(h, h->right, c, h->summed), h->values + c * h->width_pitch);
    } else {
        unpack(turned(h->right), h->summed, h->columns, h->columns_pitch, h->matrix);
    }
    for (int64_t r = 0; r < h->rows; r++) {
        struct some levels = levels_in(h, h->left, r, h->summed);
        combine(h->matrix, h->is_linear ? h->width_pitch : h->columns_pitch, levels, h->row);
        if (h->values && !h->is_linear) /* (left right^T) values */
            combine(h->values, h->width_pitch, numbers_in(h, h->row, h->columns), h->row);
        store_row(h, r, h->values ? h->width : h->columns);
    }
}

/* By bit planes
 * ------------------------------------------------------------------------------------------------------------------ */

/* What a bit is worth in each plane that holds bits, of positive levels and of negative ones; returns how many there are. */
INLINE int planes_of(const int32_t planes[2], int32_t *worth) {
    int count = 0;
    for (int side = 0; side < 2; side++)
        for (int k = 0; k < planes[side]; k++) worth[count++] = side ? -(1 << k) : 1 << k;
    return count;
}

/* The planes of an operand as words of 64 levels, [planes][rows][words]. counts: set bits and active levels. */
INLINE void pack(const struct lbq_head *h, struct lbq_levels from, int64_t rows, int64_t n, const int32_t planes[2], uint64_t *out,
                 int64_t *counts) {
    int64_t words = (n + 63) / 64;
    memset(out, 0, (size_t)((planes[0] + planes[1]) * rows * words) * sizeof *out);
    for (int64_t r = 0; r < rows; r++) {
        struct some levels = levels_in(h, from, r, n);
        counts[1] += levels.count;
        for (int64_t i = 0; i < levels.count; i++) {
            int32_t level = levels.numbers[i], at = levels.places[i];
            int first = level < 0 ? planes[0] : 0;
            for (uint32_t bits = (uint32_t)(level < 0 ? -level : level); bits; bits &= bits - 1, counts[0]++)
                out[((first + __builtin_ctz(bits)) * rows + r) * words + at / 64] |= (uint64_t)1 << at % 64;
        }
    }
}

/* The planes of the values: a bit is a number whose bits are all set, [planes][columns][pitch]. Each row's bits are counted. */
INLINE void pack_values(const struct lbq_head *h, int64_t *counts) {
    const int32_t *planes = h->value_planes;
    memset(h->values, 0, (size_t)((planes[0] + planes[1]) * h->columns * h->width_pitch) * sizeof *h->values);
    for (int64_t c = 0; c < h->columns; c++) {
        struct some levels = levels_in(h, h->value, c, h->width);
        int64_t found = 0;
        for (int64_t i = 0; i < levels.count; i++) {
            int32_t level = levels.numbers[i];
            int first = level < 0 ? planes[0] : 0;
            for (uint32_t bits = (uint32_t)(level < 0 ? -level : level); bits; bits &= bits - 1, found++)
                h->values[((first + __builtin_ctz(bits)) * h->columns + c) * h->width_pitch + levels.places[i]] = -1;
        }
        h->value_bits[c] = found;
        counts[0] += found, counts[1] += levels.count;
    }
}

/* out = the sum of some scores, each shifted and added for every set bit of its values. Returns how many were added. */
INLINE int64_t combine_planes(const struct lbq_head *h, struct some scores, const int32_t *worth, int planes, int32_t *out) {
    int64_t added = 0;
    for (int64_t i = 0; i < scores.count; i++) added += h->value_bits[scores.places[i]];
    for (int64_t e = 0; e < h->width_pitch; e += LANES) {
        vi sum = {0};
        for (int p = 0; p < planes; p++) {
            const int32_t *mask = h->values + p * h->columns * h->width_pitch + e;
            vi part = {0};
            for (int64_t i = 0; i < scores.count; i++)
                part += load(mask + scores.places[i] * h->width_pitch) & scores.numbers[i];
            sum += part * worth[p];
        }
        store(out + e, sum);
    }
    return added;
}

/* Bits that one row of a plane shares with each row of another: `each` for a bit, added to row. Returns how many. */
INLINE int64_t shared_bits(const uint64_t *one, const uint64_t *other, int64_t words, int64_t columns, int32_t each, int32_t *row) {
    int64_t found = 0;
    for (int64_t c = 0; c < columns; c++, other += words) {
        int32_t bits = 0;
        for (int64_t w = 0; w < words; w++) bits += __builtin_popcountll(one[w] & other[w]);
        row[c] += bits * each, found += bits;
    }
    return found;
}

/* The same integers by an AND and a popcount for each pair of words, then by additions of what they found. */
void NAME(lbq_product_planes)(const struct lbq_head *head, int64_t counts[5]) {
    const struct lbq_head own = *head, *h = &own;
    int64_t words = (h->summed + 63) / 64;
    int32_t worth[LBQ_MOST_PLANES], other_worth[LBQ_MOST_PLANES], value_worth[LBQ_MOST_PLANES];
    int planes = planes_of(h->left_planes, worth), others = planes_of(h->right_planes, other_worth);
    int masks = planes_of(h->value_planes, value_worth);
    pack(h, h->left, h->rows, h->summed, h->left_planes, h->left_words, counts + 3);
    pack(h, h->right, h->columns, h->summed, h->right_planes, h->right_words, counts + 3);
    if (h->values) pack_values(h, counts + 3);
    for (int64_t r = 0; r < h->rows; r++) {
        memset(h->row, 0, (size_t)h->columns * sizeof *h->row);
        for (int i = 0; i < planes; i++)
            for (int j = 0; j < others; j++) {
                const uint64_t *one = h->left_words + (i * h->rows + r) * words;
                const uint64_t *other = h->right_words + j * h->columns * words;
                int32_t each = worth[i] * other_worth[j];
                counts[0] += h->columns * words;
                counts[1] += words == 1 ? shared_bits(one, other, 1, h->columns, each, h->row)
                                        : shared_bits(one, other, words, h->columns, each, h->row);
            }
        if (h->values) {
            int64_t added = combine_planes(h, numbers_in(h, h->row, h->columns), value_worth, masks, h->row);
            counts[1] += added, counts[2] += added;
        }
        store_row(h, r, h->values ? h->width : h->columns);
    }
}
LBQ_END
