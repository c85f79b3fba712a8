/* Sums of weight rows times levels, for model.c. Not part of the interface, which is model.h.

   Weights of 8 bits lie two to a halfword, weights of 4 bits four: halfword j of a row has those of outputs j, lanes + j and
   so on, each with 2^(bits - 1) added. A sum of halfwords times levels is, modulo 2^16, the sum of the lowest weights plus
   2^bits times that of the halfwords without them. So sums of halfwords, shifted and not, give every output's sum without
   widening a weight. A list is as long as the result fits into 16 bits. All of it is unsigned arithmetic, which C defines.

   A compiler makes vector instructions of the loops over halfwords. A CPU without such instructions adds two halfwords at a
   time in a word of 32 bits instead. */
#ifndef MODEL_ROWS_H
#define MODEL_ROWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* 1: words of two halfwords. It needs a CPU that stores the lowest byte first. */
#ifndef LBQ_WORDS
#if defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M' && !defined(__ARM_FEATURE_MVE) && !defined(__ARM_BIG_ENDIAN)
#define LBQ_WORDS 1
#else
#define LBQ_WORDS 0
#endif
#endif

/* Loops of a constant length: what compilers need to make vector instructions of them without -O3. */
#ifdef __GNUC__
#define MODEL_INLINE static inline __attribute__((always_inline))
#else
#define MODEL_INLINE static inline
#endif

enum { MODEL_LIST = 64, MODEL_SCAN = 8, MODEL_TOGETHER = 4, MODEL_LANES = 32 };

/* Rows to add, at these halfwords of the weights, times levels modulo 2^16. */
typedef struct {
    uint32_t row[MODEL_LIST + MODEL_TOGETHER];
    uint16_t level[MODEL_LIST + MODEL_TOGETHER];
    int32_t count;
} model_list;

/* Append those of `count` inputs, at most MODEL_SCAN, that are not zero. `row`: that of the first, others `apart`. */
static void model_append(model_list *list, const uint8_t *levels, int32_t count, int32_t with_sign, uint32_t row,
                         uint32_t apart)
{
    int32_t n = list->count, i;
    for (i = 0; i < count; i++, row += apart) {
        const uint16_t level = levels[i];
        list->row[n] = row;
        list->level[n] = (uint16_t)(level - (with_sign && level > 127 ? 256u : 0u));
        n += level != 0; /* without a branch, which would often be mispredicted */
    }
    list->count = n;
}

/* The number in -2^15 .. 2^15 - 1 that these 16 bits stand for. */
static inline int32_t model_signed(uint32_t bits)
{
    return (int32_t)((bits + 32768u) & 65535u) - 32768;
}

#if LBQ_WORDS

/* Add the list's rows to sums: at halfwords j and j + 1, in `parts` parts of `bits` bits. */
MODEL_INLINE void model_add_word(const uint16_t *weights, const model_list *list, int32_t bits, int32_t parts,
                                 uint32_t bias, int32_t j, int32_t lanes, int32_t *sums)
{
    const uint32_t mask = bits == 8 ? 0x00ff00ffu : 0x000f000fu;
    uint32_t total[4] = {0, 0, 0, 0};
    int32_t n, p;
    for (n = 0; n < list->count; n++) {
        const uint32_t level = (uint32_t)model_signed(list->level[n]);
        uint32_t word;
        memcpy(&word, weights + list->row[n] + j, sizeof word);
        for (p = 0; p < parts; p++)
            total[p] += ((word >> (bits * p)) & mask) * level;
    }
    for (p = 0; p < parts; p++) {
        const uint32_t both = total[p] - bias * 65537u;
        const int32_t first = model_signed(both);
        sums[p * lanes + j] += first;
        sums[p * lanes + j + 1] += model_signed((both - (uint32_t)first) >> 16);
    }
}

static void model_add(const uint16_t *weights, model_list *list, int32_t bits, uint32_t bias, int32_t lanes, int32_t *sums)
{
    int32_t j;
    for (j = 0; j < lanes; j += 2)
        if (bits == 8)
            model_add_word(weights, list, 8, 2, bias, j, lanes, sums);
        else
            model_add_word(weights, list, 4, 4, bias, j, lanes, sums);
}

#else

#define MODEL_SHIFTED(from, shift, level) (uint32_t)(from[j] >> (shift)) * level
#define MODEL_SUM(shift)                                                                                        \
    (uint16_t)(MODEL_SHIFTED(a, shift, la) + MODEL_SHIFTED(b, shift, lb) + MODEL_SHIFTED(c, shift, lc) +        \
               MODEL_SHIFTED(d, shift, ld))

/* Add the list's rows to sums: at `count` halfwords from `first` on, at most MODEL_LANES. */
MODEL_INLINE void model_add_block(const uint16_t *weights, const model_list *list, int32_t bits, uint32_t bias,
                                  int32_t first, int32_t count, int32_t lanes, int32_t *sums)
{
    uint16_t total[5][MODEL_LANES];
    const int32_t parts = 16 / bits;
    int32_t n, j, p;
    memset(total, 0, sizeof total);
    weights += first;
    for (n = 0; n < list->count; n += MODEL_TOGETHER) {
        const uint16_t *a = weights + list->row[n], *b = weights + list->row[n + 1];
        const uint16_t *c = weights + list->row[n + 2], *d = weights + list->row[n + 3];
        const uint16_t la = list->level[n], lb = list->level[n + 1], lc = list->level[n + 2], ld = list->level[n + 3];
        if (bits == 8)
            for (j = 0; j < count; j++) {
                total[0][j] = (uint16_t)(total[0][j] + MODEL_SUM(0));
                total[1][j] = (uint16_t)(total[1][j] + MODEL_SUM(8));
            }
        else
            for (j = 0; j < count; j++) {
                total[0][j] = (uint16_t)(total[0][j] + MODEL_SUM(0));
                total[1][j] = (uint16_t)(total[1][j] + MODEL_SUM(4));
                total[2][j] = (uint16_t)(total[2][j] + MODEL_SUM(8));
                total[3][j] = (uint16_t)(total[3][j] + MODEL_SUM(12));
            }
    }
    for (p = 0; p < parts; p++)
        for (j = 0; j < count; j++)
            sums[p * lanes + first + j] +=
                model_signed(total[p][j] - ((uint32_t)total[p + 1][j] << bits) - bias);
}

static void model_add(const uint16_t *weights, model_list *list, int32_t bits, uint32_t bias, int32_t lanes, int32_t *sums)
{
    int32_t j = 0, n;
    for (n = 0; n < MODEL_TOGETHER; n++) { /* to whole groups, with rows times zero */
        list->row[list->count + n] = 0;
        list->level[list->count + n] = 0;
    }
    for (; j + MODEL_LANES <= lanes; j += MODEL_LANES)
        model_add_block(weights, list, bits, bias, j, MODEL_LANES, lanes, sums);
    for (; j + 8 <= lanes; j += 8)
        model_add_block(weights, list, bits, bias, j, 8, lanes, sums);
    if (j < lanes)
        model_add_block(weights, list, bits, bias, j, lanes - j, lanes, sums);
}

#endif

/* Add the list's rows, times their levels, to the sums of `lanes` halfwords of outputs, and empty it. */
static void model_flush(const uint16_t *weights, model_list *list, int32_t bits, int32_t lanes, int32_t *sums)
{
    uint32_t bias = 0;
    int32_t n;
    for (n = 0; n < list->count; n++)
        bias += (uint32_t)model_signed(list->level[n]);
    if (list->count > 0)
        model_add(weights, list, bits, bias << (bits - 1), lanes, sums);
    list->count = 0;
}

#endif
