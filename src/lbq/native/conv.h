/* Bit-plane and dense kernels of a convolution: a template over registers of 4 * LANES bytes.
 *
 * The trick of the bit-plane kernel: int8 weights are stored with a bias, as bytes 0..range, and a register of bytes is
 * added as if it held 16-bit numbers, twice: as it is (low), and shifted right by eight (high). Then
 * sum of the high bytes = high, sum of the low bytes = low - 256 * high (mod 2^16): two additions and a shift for 64
 * weights, no widening. It holds while the sums stay below 2^16, for 65535 / range rows (258 at 8 bits); then they are
 * flushed into 32-bit accumulators. Rows come in groups of four. Where four bytes fit into one (weights of 6 bits or
 * fewer), they are first added as bytes; where there is an instruction for any function of three bits, full adders add
 * them first: two for three rows, and what is carried out of four rows is added once. The bias is subtracted once at the
 * end: it is bias * (sum of 2^k over all set bits).
 *
 * A row of 64 outputs has output j in byte 2 j and output 32 + j in byte 2 j + 1, so that low and high hold neighbours.
 * NEON has additions that widen, and needs no such trick: there low and high are the sums of a register's lower and upper
 * half, two additions for 16 weights.
 */
#include <string.h>
#if defined(LBQ_FOR_AVX512) || defined(LBQ_FOR_AVX2)
#include <immintrin.h>
#elif defined(LBQ_FOR_NEON)
#include <arm_neon.h>
#endif

#include "isa.h"
#include "conv_kernels.h"

#define BYTES (4 * LANES)      /* of a register */
#define PER_LINE (64 / BYTES)  /* registers of 64 outputs */
#define MAX_PARTS (2 * PER_LINE)
#define UNROLL _Pragma("GCC unroll 8")
#define LBQ_AHEAD 28     /* entries between a row that is added and one that is fetched */
#define LBQ_FAR_ROWS 4096 /* more weight rows do not stay in the second cache of usual x86 CPUs */
_Static_assert(LBQ_AHEAD + LBQ_GROUP <= LBQ_SLACK, "lists are read no further beyond their end than there is room");
typedef uint8_t vb __attribute__((vector_size(BYTES)));
typedef uint16_t vw __attribute__((vector_size(BYTES)));

INLINE vw load_row(const uint8_t *p) {
    vw v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE vw add_bytes(vw a, vw b) { return (vw)((vb)a + (vb)b); }
/* A row's address in one register: otherwise the compiler keeps a base for each part of it, and runs out of them. */
INLINE const uint8_t *row_at(const uint8_t *rows, int64_t size, uint16_t id) {
    const uint8_t *row = rows + id * size;
    __asm__("" : "+r"(row));
    return row;
}

#if defined(LBQ_FOR_NEON)
/* By a load of its own: gcc makes pairs of loads of neighbours, which are slower on a Neoverse-N1. */
INLINE vb load_once(const uint8_t *p) {
    vb v;
#if defined(__clang__)
    memcpy(&v, p, sizeof v);
#else
    __asm__("ldr %q0, %1" : "=w"(v) : "m"(*(const uint8_t(*)[BYTES])p));
#endif
    return v;
}
#endif

/* Lists
 * ------------------------------------------------------------------------------------------------------------------ */

/* 64 bits: whether (v & bit) != 0 for 64 bytes. */
INLINE uint64_t with_bits(const uint8_t *p, uint8_t bit) {
#if defined(LBQ_FOR_AVX512)
    return _mm512_test_epi8_mask(_mm512_loadu_si512(p), _mm512_set1_epi8((char)bit));
#elif defined(LBQ_FOR_AVX2)
    uint64_t found = 0;
    for (int half = 0; half < 2; half++) {
        __m256i v = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(p + 32 * half)), _mm256_set1_epi8((char)bit));
        uint32_t zero = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(v, _mm256_setzero_si256()));
        found |= (uint64_t)(uint32_t)~zero << (32 * half);
    }
    return found;
#elif defined(LBQ_FOR_NEON)
    const uint8x16_t place = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u)), wanted = vdupq_n_u8(bit);
    uint8x16_t v[4];
    UNROLL for (int i = 0; i < 4; i++) v[i] = vandq_u8(vtstq_u8(vld1q_u8(p + 16 * i), wanted), place);
    uint8x16_t sum = vpaddq_u8(vpaddq_u8(v[0], v[1]), vpaddq_u8(v[2], v[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sum, sum)), 0);
#else
    uint64_t found = 0;
    for (int part = 0; part < 8; part++) {
        uint64_t v;
        memcpy(&v, p + 8 * part, 8);
        v &= 0x0101010101010101u * bit;
        v |= v >> 4, v |= v >> 2, v |= v >> 1; /* any bit of a byte to its lowest */
        v = (v & 0x0101010101010101u) * 0x0102040810204080u >> 56;
        found |= v << (8 * part);
    }
    return found;
#endif
}

/* Positions of set bits, four at a time without asking whether there are as many: up to 3 entries too far. */
INLINE uint16_t *positions(uint16_t *to, uint64_t bits, int64_t first) {
    uint16_t *end = to + __builtin_popcountll(bits);
    while (bits) {
        for (int i = 0; i < 4; i++) {
            to[i] = (uint16_t)(first + __builtin_ctzll(bits | (1ull << 63)));
            bits &= bits - 1;
        }
        to += 4;
    }
    return end;
}

#if defined(LBQ_FOR_AVX512)
#define COMPRESS __attribute__((target(LBQ_TARGET ",avx512vbmi,avx512vbmi2")))
/* The same, 32 at a time and without a loop. */
static inline COMPRESS uint16_t *positions_compressed(uint16_t *to, uint64_t bits, int64_t first) {
    static const uint8_t count[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                      16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                      32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                      48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
    int n = __builtin_popcountll(bits);
    __m512i packed = _mm512_maskz_compress_epi8(bits, _mm512_loadu_si512(count)), base = _mm512_set1_epi16((short)first);
    __m512i low = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(packed));
    _mm512_storeu_si512(to, _mm512_add_epi16(low, base));
    if (n > 32) {
        __m512i high = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(packed, 1));
        _mm512_storeu_si512(to + 32, _mm512_add_epi16(high, base));
    }
    return to + n;
}
#endif

/* Magnitudes of 64 levels (zeros beyond `rest`), and which of them are negative. */
INLINE uint64_t magnitudes(const struct lbq_conv *c, const uint8_t *levels, int64_t rest, uint8_t out[64]) {
    uint64_t negative = 0;
    if (rest < 64) memset(out, 0, 64);
    memcpy(out, levels, (size_t)(rest < 64 ? rest : 64));
    if (c->is_signed) {
        negative = with_bits(out, 0x80);
        for (int i = 0; i < 64; i++) out[i] = (uint8_t)(out[i] & 0x80 ? -out[i] : out[i]);
    }
    return negative;
}

/* Which of 64 inputs belong to each slot, not yet asking for the sign. */
INLINE void slot_masks(const struct lbq_conv *c, enum lbq_lists kind, const uint8_t *levels, uint64_t *found) {
    if (kind == BY_PLANE) {
        for (int k = c->planes - 1; k >= 0; k--) *found++ = with_bits(levels, (uint8_t)(1 << k));
    } else {
        uint64_t bit[3];
        for (int k = 0; k < 3; k++) bit[k] = with_bits(levels, (uint8_t)(1 << k));
        UNROLL for (int v = 1; v <= LBQ_LARGEST_VALUE; v++) {
            if (v > c->largest) break;
            uint64_t all = UINT64_MAX;
            UNROLL for (int k = 0; k < 3; k++) all &= v >> k & 1 ? bit[k] : ~bit[k];
            found[v - 1] = all;
        }
    }
}

INLINE int64_t form_row(const struct lbq_conv *c, enum lbq_lists kind, int slots, int64_t capacity,
                        const uint8_t *levels, struct lbq_row to,
                        uint16_t *(*positions)(uint16_t *, uint64_t, int64_t)) {
    int signs = c->is_signed ? 2 : 1;
    int64_t active = 0, inputs = c->inputs;
    uint16_t *end[LBQ_MAX_SLOTS];
    for (int s = 0; s < slots; s++) end[s] = to.ids + s * capacity;
    for (int64_t x = 0; x < c->width; x++, levels += inputs) {
        int32_t *ends = to.ends + x * slots;
        for (int s = 0; s < slots; s++) ends[s] = (int32_t)(end[s] - to.ids);
        for (int64_t first = 0; first < inputs; first += 64) {
            uint8_t copy[64];
            const uint8_t *at = levels + first;
            uint64_t negative = 0, found[LBQ_MAX_SLOTS], any = 0;
            int64_t id = x * inputs + first;
            if (signs == 2 || inputs - first < 64) {
                negative = magnitudes(c, at, inputs - first, copy);
                at = copy;
            }
            slot_masks(c, kind, at, found);
            for (int s = 0; s < slots; s += signs) {
                uint64_t mask = found[s / signs];
                any |= mask;
                end[s] = positions(end[s], mask & ~negative, id);
                if (signs == 2) end[s + 1] = positions(end[s + 1], mask & negative, id);
            }
            active += __builtin_popcountll(any);
        }
    }
    for (int s = 0; s < slots; s++) to.ends[c->width * slots + s] = (int32_t)(end[s] - to.ids);
    return active;
}

/* Code of its own for the usual levels, 1..5: their masks and ends stay in registers. */
INLINE int64_t form_any(const struct lbq_conv *c, enum lbq_lists kind, int slots, int64_t capacity,
                        const uint8_t *levels, struct lbq_row to,
                        uint16_t *(*positions)(uint16_t *, uint64_t, int64_t)) {
    if (kind != BY_VALUE || slots != 5 || c->is_signed)
        return form_row(c, kind, slots, capacity, levels, to, positions);
    struct lbq_conv usual = *c;
    usual.largest = 5, usual.is_signed = 0;
    return form_row(&usual, BY_VALUE, 5, capacity, levels, to, positions);
}

static int64_t NAME(form)(const struct lbq_conv *c, enum lbq_lists kind, int slots, int64_t capacity,
                          const uint8_t *levels, struct lbq_row to) {
    return form_any(c, kind, slots, capacity, levels, to, positions);
}
#if defined(LBQ_FOR_AVX512)
static COMPRESS int64_t NAME(form_compressed)(const struct lbq_conv *c, enum lbq_lists kind, int slots,
                                              int64_t capacity, const uint8_t *levels, struct lbq_row to) {
    return form_any(c, kind, slots, capacity, levels, to, positions_compressed);
}
#endif

/* Copy n entries, 32 at a time, adding `base`. */
INLINE void append(uint16_t *to, const uint16_t *from, int64_t n, vw base) {
    for (int64_t i = 0; i < n; i += 32)
        UNROLL for (int v = 0; v < PER_LINE; v++) {
            vw x;
            memcpy(&x, from + i + v * (BYTES / 2), sizeof x);
            x += base;
            memcpy(to + i + v * (BYTES / 2), &x, sizeof x);
        }
}

/* As many entries are copied as the longest list so far had: a loop whose length hardly changes is predicted. */
INLINE int64_t gather_lists(struct lbq_window *w, uint16_t shift, uint16_t zero, int64_t x0, int64_t x1,
                            const struct lbq_pixel *to, int rows) {
    const int32_t *begin[LBQ_MAX_TAPS];
    const uint16_t *from[LBQ_MAX_TAPS];
    vw base[LBQ_MAX_TAPS];
    uint16_t *ids = to->ids;
    int32_t *lengths = to->lengths;
    int slots = w->slots;
    int64_t used = 0, span = (x1 - x0) * slots;
    const uint64_t fill = zero * 0x0001000100010001u; /* a group of it */
    UNROLL for (int i = 0; i < rows; i++) {
        begin[i] = w->from[i].ends + x0 * slots, from[i] = w->from[i].ids;
        base[i] = (vw){0} + (uint16_t)(w->base[i] + shift);
    }
    for (int s = 0; s < slots; s++) {
        int64_t before = used, longest = w->longest[s];
        UNROLL for (int i = 0; i < rows; i++) {
            int64_t start = begin[i][s], n = begin[i][s + span] - start;
            longest = n > longest ? n : longest;
            append(ids + used, from[i] + start, longest, base[i]);
            used += n;
        }
        w->longest[s] = (int32_t)longest;
        lengths[s] = (int32_t)(used - before);
        memcpy(ids + used, &fill, sizeof fill);
        used = LBQ_FULL(used);
    }
    return used;
}

static int64_t NAME(gather)(struct lbq_window *w, uint16_t shift, uint16_t zero, int64_t x0, int64_t x1,
                            const struct lbq_pixel *to) {
    if (w->rows == 3) return gather_lists(w, shift, zero, x0, x1, to, 3); /* the usual kernel, all in registers */
    return gather_lists(w, shift, zero, x0, x1, to, w->rows);
}

/* Whether rows are fetched ahead of their addition: on Arm always, elsewhere where they are very many and it is worth code
 * of its own. */
#if defined(LBQ_FOR_NEON)
#define ALWAYS_FETCH 1
#else
#define ALWAYS_FETCH 0
#endif
INLINE int fetches(const struct lbq_conv *c) { return ALWAYS_FETCH || c->kh * c->kw * c->inputs > LBQ_FAR_ROWS; }

/* Bit planes
 * ------------------------------------------------------------------------------------------------------------------ */

#if defined(LBQ_FOR_AVX512)
/* A full adder of every bit: a + b + *sum = *sum + 2 * what is returned. */
INLINE vw carry(vw *sum, vw a, vw b) {
    __m512i carried = (__m512i)*sum, x = (__m512i)a, y = (__m512i)b;
    __asm__("" : "+v"(carried), "+v"(x), "+v"(y)); /* one copy and one load each: left to itself, gcc makes more of both */
    *sum = (vw)_mm512_ternarylogic_epi64((__m512i)*sum, x, y, 0x96);
    return (vw)_mm512_ternarylogic_epi64(carried, x, y, 0xe8);
}
#endif

/* low and high of a row, added. */
INLINE void add_row(vw *low, vw *high, vw x) {
#if defined(LBQ_FOR_NEON)
    *low = vaddw_u8(*low, vget_low_u8((vb)x)), *high = vaddw_high_u8(*high, (vb)x);
#else
    *low += x, *high += x >> 8;
#endif
}

#if defined(LBQ_FOR_NEON)
/* The rows of a group, added to low and high, or their first (fresh): two of them are then added as bytes, without zeros. */
INLINE void add_group(int parts, int by_four, int fresh, const uint8_t *rows, int64_t size, const uint16_t *ids, vw *low,
                      vw *high) {
    const uint8_t *row[LBQ_GROUP];
    UNROLL for (int g = 0; g < LBQ_GROUP; g++) {
        row[g] = row_at(rows, size, ids[g]);
        __builtin_prefetch(rows + ids[g + LBQ_AHEAD] * size);
    }
    UNROLL for (int v = 0; v < parts; v++) {
        vb x[LBQ_GROUP];
        UNROLL for (int g = 0; g < LBQ_GROUP; g++)
            x[g] = by_four ? (vb)load_row(row[g] + v * BYTES) : load_once(row[g] + v * BYTES);
        int left = LBQ_GROUP; /* registers to add up */
        if (by_four) x[0] += x[1], x[1] = x[2] + x[3], left = 2;
        if (by_four && !fresh) x[0] += x[1], left = 1;
        if (fresh) low[v] = vaddl_u8(vget_low_u8(x[0]), vget_low_u8(x[1])), high[v] = vaddl_high_u8(x[0], x[1]);
        UNROLL for (int g = fresh ? 2 : 0; g < left; g++) add_row(&low[v], &high[v], (vw)x[g]);
    }
}

/* The sum of n rows as low and high. The last group is full, see lbq_pixel. Rows of entries to come are always fetched, or
 * those beyond the last, and nothing else is: that was only measured on x86. */
INLINE void sum_rows(int parts, int by_four, int fetch, const uint8_t *rows, int64_t size, const uint16_t *ids, int64_t n,
                     struct lbq_span *soon, vw *low, vw *high) {
    const uint16_t *end = ids + LBQ_FULL(n);
    (void)fetch, (void)soon;
    __asm__("" : "+r"(rows)); /* one register, see row_at */
    if (n == 0) {
        UNROLL for (int v = 0; v < parts; v++) low[v] = high[v] = (vw){0};
        return;
    }
    add_group(parts, by_four, 1, rows, size, ids, low, high);
    while ((ids += LBQ_GROUP) < end) add_group(parts, by_four, 0, rows, size, ids, low, high);
}
#else
INLINE void fetch_line(struct lbq_span *soon) {
    __builtin_prefetch(soon->from, 0, 2);
    soon->from += soon->from < soon->end ? 64 : 0;
}

/* The sum of n rows as low and high. The last group is full, see lbq_pixel. fetch: rows are fetched ahead, those of entries
 * to come, or beyond the last. With each group comes a line of the weights that are read soon. */
INLINE void sum_rows(int parts, int by_four, int fetch, const uint8_t *rows, int64_t size, const uint16_t *ids, int64_t n,
                     struct lbq_span *soon, vw *low, vw *high) {
#if defined(LBQ_FOR_AVX512)
    vw ones[MAX_PARTS], twos[MAX_PARTS];
    UNROLL for (int v = 0; v < parts; v++) ones[v] = twos[v] = (vw){0};
#endif
    UNROLL for (int v = 0; v < parts; v++) low[v] = high[v] = (vw){0};
    __asm__("" : "+r"(rows)); /* one register, see row_at */
    for (int64_t i = 0; i < n; i += LBQ_GROUP) {
        const uint8_t *row[LBQ_GROUP];
        UNROLL for (int g = 0; g < LBQ_GROUP; g++) row[g] = row_at(rows, size, ids[i + g]);
        if (fetch)
            UNROLL for (int g = 0; g < LBQ_GROUP; g++)
                UNROLL for (int line = 0; line < parts * BYTES; line += 64)
                    __builtin_prefetch(rows + ids[i + LBQ_AHEAD + g] * size + line);
        fetch_line(soon);
        UNROLL for (int v = 0; v < parts; v++) {
            vw a = load_row(row[0] + v * BYTES), b = load_row(row[1] + v * BYTES);
            vw c = load_row(row[2] + v * BYTES), d = load_row(row[3] + v * BYTES);
            if (by_four) {
                add_row(&low[v], &high[v], add_bytes(add_bytes(a, b), add_bytes(c, d)));
            } else {
#if defined(LBQ_FOR_AVX512)
                vw two = carry(&ones[v], a, b), more = carry(&ones[v], c, d), four = carry(&twos[v], two, more);
                add_row(&low[v], &high[v], four);
#else
                low[v] += (a + b) + (c + d);
                high[v] += ((a >> 8) + (b >> 8)) + ((c >> 8) + (d >> 8));
#endif
            }
        }
    }
#if defined(LBQ_FOR_AVX512)
    if (!by_four)
        UNROLL for (int v = 0; v < parts; v++) {
            low[v] = (low[v] << 2) + (twos[v] << 1) + ones[v];
            high[v] = (high[v] << 2) + (twos[v] >> 8 << 1) + (ones[v] >> 8);
        }
#endif
}
#endif

/* What low and high hold, in the order of outputs. */
INLINE void unpack(int parts, const vw *low, const vw *high, uint16_t *found) {
    UNROLL for (int v = 0; v < parts; v++) {
#if defined(LBQ_FOR_NEON)
        vw even = vuzp1q_u16(low[v], high[v]), odd = vuzp2q_u16(low[v], high[v]);
#else
        vw even = low[v] - (high[v] << 8), odd = high[v];
#endif
        uint16_t *at = found + v / PER_LINE * 64 + v % PER_LINE * (BYTES / 2);
        memcpy(at, &even, sizeof even);
        memcpy(at + 32, &odd, sizeof odd);
    }
}

/* How many rows low and high can hold, in whole groups. */
INLINE int64_t most_rows(int32_t range) { return 65535 / range & ~(LBQ_GROUP - 1); }

/* sums = sums * 2^shift + sign * what low and high hold. */
INLINE void flush(int parts, const vw *low, const vw *high, int shift, int negative, uint32_t *sums) {
    uint16_t found[LBQ_MAX_BLOCK];
    unpack(parts, low, high, found);
    if (negative)
        for (int j = 0; j < parts * BYTES; j++) sums[j] = (sums[j] << shift) - found[j];
    else
        for (int j = 0; j < parts * BYTES; j++) sums[j] = (sums[j] << shift) + found[j];
}

/* The planes that low and high hold, added up in their 16 bits where the result fits (narrow): sums = it (fresh), or
 * sums +- it; then low and high are empty. */
INLINE void flush_planes(int parts, int planes, vw low[][MAX_PARTS], vw high[][MAX_PARTS], uint32_t bias, int narrow,
                         int negative, int fresh, uint32_t *sums) {
    uint16_t found[3][LBQ_MAX_BLOCK];
#if defined(LBQ_FOR_NEON) && defined(__clang__)
    if (fresh) memset(sums, 0, (size_t)(parts * BYTES) * sizeof *sums); /* or clang makes no vectors of the loops below */
    fresh = 0;
#endif
    if (narrow) {
        UNROLL for (int k = planes - 2; k >= 0; k--)
            UNROLL for (int v = 0; v < parts; v++) {
                low[k][v] += low[k + 1][v] << 1;
                high[k][v] += high[k + 1][v] << 1;
            }
        unpack(parts, low[0], high[0], found[0]);
        for (int64_t j = 0; j < parts * BYTES; j++) {
            uint32_t sum = found[0][j] - bias;
            sums[j] = fresh ? sum : negative ? sums[j] - sum : sums[j] + sum;
        }
    } else {
        UNROLL for (int k = 0; k < planes; k++) unpack(parts, low[k], high[k], found[k]);
        for (int64_t j = 0; j < parts * BYTES; j++) {
            uint32_t sum = found[0][j] - bias;
            if (planes > 1) sum += (uint32_t)found[1][j] << 1;
            if (planes > 2) sum += (uint32_t)found[2][j] << 2;
            sums[j] = fresh ? sum : negative ? sums[j] - sum : sums[j] + sum;
        }
    }
    UNROLL for (int k = 0; k < planes; k++)
        UNROLL for (int v = 0; v < parts; v++) low[k][v] = high[k][v] = (vw){0};
}

/* Levels 1..7: the rows of a level are added once, and their sum to those of the level's planes, of which up to three
 * lie side by side in registers. */
INLINE void values_block(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums, int parts,
                         int by_four, int planes, int largest, int signs, int fetch) {
    int64_t size = parts * BYTES, limit = most_rows(c->range), left = limit;
    const uint8_t *rows = c->bytes + block * (c->kh * c->kw * c->inputs + 1) * size;
    struct lbq_span soon = p->soon;
    int fresh = 1;
    vw low[3][MAX_PARTS] = {0}, high[3][MAX_PARTS] = {0};
    for (int negative = 0; negative < signs; negative++, left = limit) {
        const uint16_t *ids = p->ids;
        const int32_t *length = p->lengths;
        uint32_t weighted = 0; /* rows, each times its value */
        UNROLL for (int value = 1; value <= largest; value++) {
            if (negative) ids += LBQ_FULL(*length++); /* pass over the twin */
            for (int64_t n = *length++, some; n > 0; n -= some) {
                vw x[MAX_PARTS], y[MAX_PARTS];
                some = n < left ? n : left;
                sum_rows(parts, by_four, fetch, rows, size, ids, some, &soon, x, y);
                UNROLL for (int k = 0; k < planes; k++)
                    if (value >> k & 1)
                        UNROLL for (int v = 0; v < parts; v++) low[k][v] += x[v], high[k][v] += y[v];
                weighted += (uint32_t)(some * value);
                ids += LBQ_FULL(some), left -= LBQ_FULL(some);
                if (left == 0) {
                    flush_planes(parts, planes, low, high, (uint32_t)c->bias * weighted, 0, negative, fresh, sums);
                    fresh = 0, weighted = 0, left = limit;
                }
            }
            if (signs == 2 && !negative) ids += LBQ_FULL(*length++);
        }
        int narrow = weighted * (uint32_t)c->range <= UINT16_MAX; /* weighted is below 2^16 * 7 */
        flush_planes(parts, planes, low, high, (uint32_t)c->bias * weighted, narrow, negative, fresh, sums);
        fresh = 0;
    }
}

/* Code of its own for every case would take minutes to compile: one plane (binary spikes) or three, the usual levels 1..5
 * or any, rows that can be added as bytes or not, and blocks of 128 outputs only where there are registers for them (see
 * ConvStep). */
static void NAME(values)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums) {
    int by_four = c->range <= 255 / LBQ_GROUP;
    int largest = c->largest, signs = c->is_signed ? 2 : 1, usual = largest == 5 && signs == 1;
#define BY_CASE(parts)                                                                                        \
    if (c->planes == 1 && by_four) values_block(c, p, block, sums, parts, 1, 1, largest, signs, ALWAYS_FETCH); \
    else if (c->planes == 1) values_block(c, p, block, sums, parts, 0, 1, largest, signs, ALWAYS_FETCH);      \
    else if (by_four && usual) values_block(c, p, block, sums, parts, 1, 3, 5, 1, ALWAYS_FETCH);              \
    else if (by_four) values_block(c, p, block, sums, parts, 1, 3, largest, signs, ALWAYS_FETCH);             \
    else if (usual && fetches(c)) values_block(c, p, block, sums, parts, 0, 3, 5, 1, 1);                      \
    else if (usual) values_block(c, p, block, sums, parts, 0, 3, 5, 1, ALWAYS_FETCH);                         \
    else values_block(c, p, block, sums, parts, 0, 3, largest, signs, ALWAYS_FETCH);
#if defined(LBQ_FOR_AVX512)
    if (c->block == 128) {
        BY_CASE(2 * PER_LINE)
        return;
    }
#endif
    BY_CASE(PER_LINE)
}

INLINE void planes_block(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums, int parts,
                         int by_four) {
    int64_t size = parts * BYTES, limit = most_rows(c->range);
    const uint8_t *rows = c->bytes + block * (c->kh * c->kw * c->inputs + 1) * size;
    const uint16_t *ids = p->ids;
    struct lbq_span soon = p->soon;
    int signs = c->is_signed ? 2 : 1;
    uint32_t weighted = 0;
    memset(sums, 0, (size_t)size * sizeof *sums);
    for (int k = c->planes - 1, s = 0; k >= 0; k--) {
        int shift = k != c->planes - 1; /* Horner: one shift of the accumulators for each plane but the first */
        for (int negative = 0; negative < signs; negative++, s++) {
            int64_t n = p->lengths[s];
            weighted += (negative ? -(uint32_t)n : (uint32_t)n) << k;
            do {
                int64_t some = n < limit ? n : limit;
                vw low[MAX_PARTS], high[MAX_PARTS];
                sum_rows(parts, by_four, ALWAYS_FETCH, rows, size, ids, some, &soon, low, high);
                flush(parts, low, high, shift, negative, sums);
                shift = 0, ids += LBQ_FULL(some), n -= some;
            } while (n > 0);
        }
    }
    for (int j = 0; j < size; j++) sums[j] -= (uint32_t)c->bias * weighted;
}

static void NAME(planes)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums) {
    int by_four = c->range <= 255 / LBQ_GROUP;
#if defined(LBQ_FOR_AVX512)
    if (c->block == 128) {
        if (by_four) planes_block(c, p, block, sums, 2 * PER_LINE, 1);
        else planes_block(c, p, block, sums, 2 * PER_LINE, 0);
        return;
    }
#endif
    if (by_four) planes_block(c, p, block, sums, PER_LINE, 1);
    else planes_block(c, p, block, sums, PER_LINE, 0);
}

/* In 32 bits throughout: weights of 16 bits, weights shifted beforehand, scaled as they are added, or shifted one by one
 * ------------------------------------------------------------------------------------------------------------------ */

static void NAME(wide)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums) {
    int64_t size = c->block, rows = c->kh * c->kw * c->inputs, blocks = (c->outputs + size - 1) / size;
    const uint16_t *ids = p->ids;
    int signs = c->is_signed ? 2 : 1;
    memset(sums, 0, (size_t)size * sizeof *sums);
    for (int k = c->planes - 1, s = 0; k >= 0; k--) {
        if (c->backend == LBQ_HORNER && k != c->planes - 1)
            for (int64_t j = 0; j < size; j++) sums[j] <<= 1;
        for (int negative = 0; negative < signs; negative++, s++) {
            for (int64_t i = 0; i < p->lengths[s]; i++) {
                uint32_t sign = negative ? UINT32_MAX : 0; /* (x ^ sign) - sign is +-x */
                if (c->backend == LBQ_PRESHIFTED) {
                    const int32_t *row = c->shifted + ((k * blocks + block) * rows + ids[i]) * size;
                    for (int64_t j = 0; j < size; j++) sums[j] += ((uint32_t)row[j] ^ sign) - sign;
                    continue;
                }
                const int16_t *row = c->words + (block * rows + ids[i]) * size;
                if (c->backend == LBQ_FUSED) { /* one multiplication and addition, as many CPUs have in one */
                    uint32_t factor = (((uint32_t)1 << k) ^ sign) - sign;
                    for (int64_t j = 0; j < size; j++) sums[j] += (uint32_t)row[j] * factor;
                    continue;
                }
                int shift = c->backend == LBQ_EXPLICIT ? k : 0;
                for (int64_t j = 0; j < size; j++) sums[j] += (((uint32_t)row[j] << shift) ^ sign) - sign;
            }
            ids += LBQ_FULL(p->lengths[s]);
        }
    }
}

/* Dense
 * ------------------------------------------------------------------------------------------------------------------ */

#if defined(LBQ_FOR_AVX512)
__attribute__((target(LBQ_TARGET ",avx512vnni"))) static void NAME(dense_quads)(const struct lbq_conv *c,
                                                                     const uint8_t *const at[LBQ_DENSE_TILE],
                                                                     int64_t line, int64_t block, struct lbq_span soon,
                                                                     int32_t sums[LBQ_DENSE_TILE][64]) {
    int64_t quads = (c->inputs + 3) / 4;
    const int8_t *weights = c->quads + block * c->kh * c->kw * quads * 256;
    __m512i acc[LBQ_DENSE_TILE][4];
    UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++)
        UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_si512();
    for (int64_t ky = 0; ky < c->kh; ky++)
        for (int64_t q = 0, offset = ky * line; q < c->kw * quads; q++, offset += 4, weights += 256) {
            __m512i w[4];
            fetch_line(&soon);
            UNROLL for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_si512(weights + 64 * j);
            UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++) {
                int32_t four;
                memcpy(&four, at[i] + offset, 4);
                __m512i x = _mm512_set1_epi32(four);
                UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_dpbusd_epi32(acc[i][j], x, w[j]);
            }
        }
    UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++)
        UNROLL for (int j = 0; j < 4; j++) _mm512_storeu_si512(sums[i] + 16 * j, acc[i][j]);
}
#elif defined(LBQ_FOR_NEON)
#if defined(__clang__)
#define DOTPROD __attribute__((target("dotprod")))
#else
#define DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
/* Lane l of every x, four inputs, times the weights of 16 outputs, each of which has four in a row. As assembly: some
 * compilers declare the instruction only where a whole file may use it, and others load all weights first and run out of
 * registers. */
#define LANE(l)                                                                                     \
    UNROLL for (int j = 0; j < 4; j++) {                                                            \
        int8x16_t w = vld1q_s8(weights + 256 * (l) + 16 * j);                                       \
        UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++)                                             \
            __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[" #l "]" : "+w"(acc[i][j]) : "w"(w), "w"(x[i])); \
    }
static DOTPROD void NAME(dense_quads)(const struct lbq_conv *c, const uint8_t *const at[LBQ_DENSE_TILE], int64_t line,
                                      int64_t block, struct lbq_span soon, int32_t sums[LBQ_DENSE_TILE][64]) {
    (void)soon;
    int64_t quads = (c->inputs + 3) / 4, taken = c->kw * quads;
    for (int part = 0; part < 64; part += 16) {
        const int8_t *weights = c->quads + block * c->kh * taken * 256 + part * 4;
        int32x4_t acc[LBQ_DENSE_TILE][4];
        UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++)
            UNROLL for (int j = 0; j < 4; j++) acc[i][j] = vdupq_n_s32(0);
        for (int64_t ky = 0; ky < c->kh; ky++) {
            int64_t q = 0, offset = ky * line;
            int8x16_t x[LBQ_DENSE_TILE];
            for (; q + 4 <= taken; q += 4, offset += 16, weights += 4 * 256) {
                UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++) x[i] = vld1q_s8((const int8_t *)at[i] + offset);
                LANE(0) LANE(1) LANE(2) LANE(3)
            }
            for (; q < taken; q++, offset += 4, weights += 256) {
                UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++) {
                    int32_t four;
                    memcpy(&four, at[i] + offset, 4);
                    x[i] = vreinterpretq_s8_s32(vdupq_n_s32(four));
                }
                LANE(0)
            }
        }
        UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++)
            UNROLL for (int j = 0; j < 4; j++) vst1q_s32(sums[i] + part + 4 * j, acc[i][j]);
    }
}
#undef LANE
#endif

static void NAME(dense_pairs)(const struct lbq_conv *c, const int16_t *const at[LBQ_DENSE_TILE], int64_t line,
                              int64_t block, int32_t sums[LBQ_DENSE_TILE][16]) {
    int64_t pairs = (c->inputs + 1) / 2;
    const int16_t *weights = c->pairs + block * c->kh * c->kw * pairs * 32;
#if defined(LBQ_FOR_AVX512) || defined(LBQ_FOR_AVX2)
    __m256i acc[LBQ_DENSE_TILE][2];
    UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++) acc[i][0] = acc[i][1] = _mm256_setzero_si256();
    for (int64_t ky = 0; ky < c->kh; ky++)
        for (int64_t q = 0, offset = ky * line; q < c->kw * pairs; q++, offset += 2, weights += 32) {
            __m256i w0 = _mm256_loadu_si256((const __m256i *)weights);
            __m256i w1 = _mm256_loadu_si256((const __m256i *)(weights + 16));
            UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++) {
                int32_t two;
                memcpy(&two, at[i] + offset, 4);
                __m256i x = _mm256_set1_epi32(two);
                acc[i][0] = _mm256_add_epi32(acc[i][0], _mm256_madd_epi16(x, w0));
                acc[i][1] = _mm256_add_epi32(acc[i][1], _mm256_madd_epi16(x, w1));
            }
        }
    UNROLL for (int i = 0; i < LBQ_DENSE_TILE; i++) {
        _mm256_storeu_si256((__m256i *)sums[i], acc[i][0]);
        _mm256_storeu_si256((__m256i *)(sums[i] + 8), acc[i][1]);
    }
#else
    memset(sums, 0, LBQ_DENSE_TILE * sizeof sums[0]);
    for (int64_t ky = 0; ky < c->kh; ky++)
        for (int64_t q = 0, offset = ky * line; q < c->kw * pairs; q++, offset += 2, weights += 32)
            for (int i = 0; i < LBQ_DENSE_TILE; i++)
                for (int j = 0; j < 16; j++)
                    sums[i][j] += at[i][offset] * weights[2 * j] + at[i][offset + 1] * weights[2 * j + 1];
#endif
}

#include "conv_pairs.h"

const struct lbq_kernels NAME(lbq_kernels) = {
    .form = NAME(form),
    .form_pairs = NAME(form_pairs),
#if defined(LBQ_FOR_AVX512)
    .form_compressed = NAME(form_compressed),
#endif
    .gather = NAME(gather),
    .run = {[BY_VALUE] = NAME(values), [BY_PLANE] = NAME(planes)},
    .pairs = NAME(pairs),
    .wide = NAME(wide),
    .dense_pairs = NAME(dense_pairs),
#if defined(LBQ_FOR_AVX512) || defined(LBQ_FOR_NEON)
    .dense_quads = NAME(dense_quads),
#endif
};
LBQ_END
