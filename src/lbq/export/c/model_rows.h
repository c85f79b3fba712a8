/* Sums of weight rows times levels, for model.c. Not part of the interface, which is model.h.

   Weights of 8 bits lie two to a halfword, weights of 4 bits four: halfword j of a row has those of outputs j, lanes + j and
   so on, each with 2^(bits - 1) added. A sum of halfwords times levels is, modulo 2^16, the sum of the lowest weights plus
   2^bits times that of the halfwords without them. So sums of halfwords, shifted and not, give every output's sum without
   widening a weight. A list is as long as the result fits into 16 bits. All of it is unsigned arithmetic, which C defines.

   A compiler makes vector instructions of the loops over halfwords. A CPU without such instructions adds two halfwords at a
   time in a word of 32 bits instead. Arm's Helium has intrinsics of its own, because compilers do not get far with it. */
#ifndef MODEL_ROWS_H
#define MODEL_ROWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __ARM_FEATURE_MVE
#include <arm_mve.h>
#endif

/* 1: words of two halfwords. It needs a CPU that stores the lowest byte first. */
#ifndef LBQ_WORDS
#if defined(__ARM_ARCH_PROFILE) && __ARM_ARCH_PROFILE == 'M' && !defined(__ARM_FEATURE_MVE) && !defined(__ARM_BIG_ENDIAN)
#define LBQ_WORDS 1
#else
#define LBQ_WORDS 0
#endif
#endif

/* 1: the CPU loads words from any even address. For others a compiler would load them byte by byte. */
#ifndef LBQ_UNALIGNED
#if defined(__ARM_ARCH) && !defined(__ARM_FEATURE_UNALIGNED)
#define LBQ_UNALIGNED 0
#else
#define LBQ_UNALIGNED 1
#endif
#endif

/* Loops of a constant length: what compilers need to make vector instructions of them without -O3. */
#if defined(__GNUC__) && defined(__OPTIMIZE__)
#define MODEL_INLINE static inline __attribute__((always_inline))
#else
#define MODEL_INLINE static inline
#endif

/* Halfwords that are added at a time; whether a CPU is so simple that a branch costs no more than what it saves. */
#ifdef __ARM_FEATURE_MVE
enum { MODEL_LANES = 8, MODEL_BRANCHES = 1 };
#else
enum { MODEL_LANES = 32, MODEL_BRANCHES = LBQ_WORDS };
#endif
enum { MODEL_LIST = 64, MODEL_SCAN = 8, MODEL_TOGETHER = 4 };

/* Rows to add, at these halfwords of the weights, times levels modulo 2^32. */
typedef struct {
    uint32_t row[MODEL_LIST + MODEL_TOGETHER];
    uint32_t level[MODEL_LIST + MODEL_TOGETHER];
    int32_t count;
} model_list;

/* Append those of `count` inputs, at most MODEL_SCAN, that are not zero. `row`: that of the first, others `apart`. */
MODEL_INLINE void model_append(model_list *list, const uint8_t *levels, int32_t count, int32_t with_sign, uint32_t row,
                               uint32_t apart)
{
    int32_t n = list->count, i;
    for (i = 0; i < count; i++, row += apart) {
        const uint32_t level = levels[i];
        if (MODEL_BRANCHES && level == 0) /* elsewhere a branch would often be mispredicted */
            continue;
        list->row[n] = row;
        list->level[n] = level - (with_sign && level > 127 ? 256u : 0u);
        n += level != 0;
    }
    list->count = n;
}

/* The number in -2^15 .. 2^15 - 1 that these 16 bits stand for. */
static inline int32_t model_signed(uint32_t bits)
{
    return (int32_t)((bits + 32768u) & 65535u) - 32768;
}

#if LBQ_WORDS

/* Add the list's rows to sums: at `words` words of two halfwords from halfword `first` on. */
MODEL_INLINE void model_add_words(const uint16_t *weights, const model_list *list, int32_t bits, int32_t words,
                                  uint32_t bias, int32_t first, int32_t lanes, int32_t *sums)
{
    const int32_t parts = 16 / bits;
    uint32_t total[5][2] = {{0, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 0}};
    int32_t n, p, w;
    weights += first;
    for (n = 0; n < list->count; n++) {
        const uint16_t *row = weights + list->row[n];
        const uint32_t level = list->level[n];
        for (w = 0; w < words; w++) {
            uint32_t word;
#if LBQ_UNALIGNED
            memcpy(&word, row + 2 * w, sizeof word);
#else
            word = row[2 * w] | (uint32_t)row[2 * w + 1] << 16;
#endif
            for (p = 0; p < parts; p++) /* what is shifted from one halfword into the other is cut off */
                total[p][w] += ((word >> (bits * p)) & (0xffffu >> (bits * p)) * 65537u) * level;
        }
    }
    for (p = 0; p < parts; p++)
        for (w = 0; w < words; w++) {
            const uint32_t both = total[p][w] - (total[p + 1][w] << bits) - bias * 65537u;
            int32_t *at = sums + p * lanes + first + 2 * w;
            at[0] += model_signed(both);
            at[1] += model_signed((both - (uint32_t)model_signed(both)) >> 16);
        }
}

static void model_add(const uint16_t *weights, model_list *list, int32_t bits, uint32_t bias, int32_t lanes, int32_t *sums)
{
    int32_t j = 0;
    if (bits == 8)
        for (; j + 4 <= lanes; j += 4)
            model_add_words(weights, list, 8, 2, bias, j, lanes, sums);
    for (; j < lanes; j += 2)
        if (bits == 8)
            model_add_words(weights, list, 8, 1, bias, j, lanes, sums);
        else
            model_add_words(weights, list, 4, 1, bias, j, lanes, sums);
}

#else

#ifdef __ARM_FEATURE_MVE

/* The sums of `count` halfwords of the list's rows, shifted by 0, `bits`, ... */
MODEL_INLINE void model_sum(const uint16_t *weights, const model_list *list, int32_t bits, int32_t count,
                            uint16_t total[5][MODEL_LANES])
{
    const mve_pred16_t valid = vctp16q((uint32_t)count);
    uint16x8_t sum[4] = {vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0)};
    int32_t n, p;
    for (n = 0; n < list->count; n++) {
        const uint16x8_t row = vldrhq_z_u16(weights + list->row[n], valid);
        const uint16_t level = (uint16_t)list->level[n];
        sum[0] = vmlaq_n_u16(sum[0], row, level);
        if (bits == 4) {
            sum[1] = vmlaq_n_u16(sum[1], vshrq_n_u16(row, 4), level);
            sum[2] = vmlaq_n_u16(sum[2], vshrq_n_u16(row, 8), level);
            sum[3] = vmlaq_n_u16(sum[3], vshrq_n_u16(row, 12), level);
        } else
            sum[1] = vmlaq_n_u16(sum[1], vshrq_n_u16(row, 8), level);
    }
    for (p = 0; p < 4; p++)
        vst1q_u16(total[p], sum[p]);
}

#else

#define MODEL_SHIFTED(from, shift, level) (uint32_t)(from[j] >> (shift)) * level
#define MODEL_SUM(shift)                                                                                 \
    (uint16_t)(MODEL_SHIFTED(a, shift, la) + MODEL_SHIFTED(b, shift, lb) + MODEL_SHIFTED(c, shift, lc) + \
               MODEL_SHIFTED(d, shift, ld))

/* The sums of `count` halfwords of the list's rows, shifted by 0, `bits`, ... */
MODEL_INLINE void model_sum(const uint16_t *weights, const model_list *list, int32_t bits, int32_t count,
                            uint16_t total[5][MODEL_LANES])
{
    int32_t n, j;
    for (n = 0; n < list->count; n += MODEL_TOGETHER) {
        const uint16_t *a = weights + list->row[n], *b = weights + list->row[n + 1];
        const uint16_t *c = weights + list->row[n + 2], *d = weights + list->row[n + 3];
        const uint16_t la = (uint16_t)list->level[n], lb = (uint16_t)list->level[n + 1];
        const uint16_t lc = (uint16_t)list->level[n + 2], ld = (uint16_t)list->level[n + 3];
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
}

#endif

/* Add the list's rows to sums: at `count` halfwords from `first` on, at most MODEL_LANES. */
MODEL_INLINE void model_add_block(const uint16_t *weights, const model_list *list, int32_t bits, uint32_t bias,
                                  int32_t first, int32_t count, int32_t lanes, int32_t *sums)
{
    uint16_t total[5][MODEL_LANES];
    const int32_t parts = 16 / bits;
    int32_t j, p;
    memset(total, 0, sizeof total);
    model_sum(weights + first, list, bits, count, total);
    for (p = 0; p < parts; p++) {
        const int32_t next = p + 1 < parts ? p + 1 : 4; /* the last is 0 */
        for (j = 0; j < count; j++)
            sums[p * lanes + first + j] += model_signed(total[p][j] - ((uint32_t)total[next][j] << bits) - bias);
    }
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
        bias += list->level[n];
    if (list->count > 0)
        model_add(weights, list, bits, bias << (bits - 1), lanes, sums);
    list->count = 0;
}

#endif
