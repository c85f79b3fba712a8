/* Two timesteps at once: a part of the template conv.h.
 *
 * An input has a pair of levels (S1, S2) at two neighbouring timesteps. The weight rows of all inputs with the same pair
 * are added up once, and the sum goes S1 times into the currents of the one timestep and S2 times into those of the other.
 * A pair without a list of its own stands in several lists whose levels have no bit in common and add up to it, such as
 * (5, 3) = (5, 1) + (0, 2): the table says in which.
 *
 * A list's sum is kept in 16 bits as low and high, as conv.h explains, and no more rows are added than fit. x86 multiplies
 * the sums of two lists into 32 bits by one instruction. Elsewhere multiples are added in 16 bits as well: 65535 / range
 * units fit, a unit being one row times one level; before more would come, they go into 32 bits.
 */

/* S1 << 3 | S2 of 64 inputs, zeros beyond n. */
INLINE void codes(const uint8_t *one, const uint8_t *two, int64_t n, uint8_t to[64]) {
    uint8_t copies[2][64] = {0};
    if (n < 64) one = memcpy(copies[0], one, (size_t)n), two = memcpy(copies[1], two, (size_t)n);
    UNROLL for (int i = 0; i < 64; i += BYTES) {
        vb a = (vb)load_row(one + i) & 7, b = (vb)load_row(two + i) & 7;
        a += a, a += a, a += a; /* times 8 */
        a |= b;
        memcpy(to + i, &a, sizeof a);
    }
}

/* The lists of a row of input pixels, whose levels at the two timesteps are `one` and `two`. */
static int64_t NAME(form_pairs)(const struct lbq_conv *c, int64_t capacity, const uint8_t *one, const uint8_t *two,
                                struct lbq_row to) {
    int32_t end[LBQ_MAX_SLOTS];
    int64_t active = 0, inputs = c->inputs;
    int slots = c->pair_lists, columns = c->pair_columns;
    const uint8_t *table = c->pair_table;
    for (int s = 0; s < slots; s++) end[s] = (int32_t)(s * capacity);
    for (int64_t x = 0; x < c->width; x++) {
        memcpy(to.ends + x * slots, end, (size_t)slots * sizeof *end);
        for (int64_t first = 0; first < inputs; first += 64) {
            uint8_t code[64], again[64];
            int64_t id = x * inputs + first, n = inputs - first < 64 ? inputs - first : 64;
            codes(one, two, n, code);
            one += n, two += n;
            active += __builtin_popcountll(with_bits(code, 7 << 3)) + __builtin_popcountll(with_bits(code, 7));
            int more = 0; /* inputs that stand in a second list */
            for (uint64_t bits = with_bits(code, 0xff); bits; bits &= bits - 1) {
                int at = __builtin_ctzll(bits);
                const uint8_t *lists = table + code[at] * LBQ_MAX_COLUMNS;
                to.ids[end[lists[0]]++] = (uint16_t)(id + at);
                again[more] = (uint8_t)at;
                more += lists[1] != LBQ_NO_LIST;
            }
            for (int i = 0; i < more; i++) {
                const uint8_t *lists = table + code[again[i]] * LBQ_MAX_COLUMNS;
                for (int k = 1; k < columns && lists[k] != LBQ_NO_LIST; k++)
                    to.ids[end[lists[k]]++] = (uint16_t)(id + again[i]);
            }
        }
    }
    memcpy(to.ends + c->width * slots, end, (size_t)slots * sizeof *end);
    return active;
}

#if defined(LBQ_FOR_AVX512) || defined(LBQ_FOR_AVX2)
#define HALF (BYTES / 2) /* numbers of 16 bits in a register, and those of 32 bits in two */
typedef int32_t vi __attribute__((vector_size(BYTES)));

/* Numbers of 16 bits of two lists side by side, of one half of the outputs, each times its level: sums of 32 bits. */
INLINE vi weigh(vw a, vw b, int upper, vi levels) {
#if defined(LBQ_FOR_AVX512)
    __m512i both = upper ? _mm512_unpackhi_epi16((__m512i)a, (__m512i)b) : _mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    return (vi)_mm512_madd_epi16(both, (__m512i)levels);
#else
    __m256i both = upper ? _mm256_unpackhi_epi16((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi16((__m256i)a, (__m256i)b);
    return (vi)_mm256_madd_epi16(both, (__m256i)levels);
#endif
}

/* Sums in the order of outputs: `weigh` takes four by four, first those of the lower half. */
INLINE void in_order(vi lower, vi upper, vi bias, uint32_t *to) {
    lower -= bias, upper -= bias;
#if defined(LBQ_FOR_AVX512)
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi64((__m512i)lower, first, (__m512i)upper));
    _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi64((__m512i)lower, second, (__m512i)upper));
#else
    _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256((__m256i)lower, (__m256i)upper, 0x20));
    _mm256_storeu_si256((__m256i *)(to + LANES), _mm256_permute2x128_si256((__m256i)lower, (__m256i)upper, 0x31));
#endif
}

/* Two lists at a time: one instruction multiplies the sums of both by their levels and adds the products in 32 bits. Its
 * factors are signed, so that 32767 / range rows fit. */
INLINE void pairs_block(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *one, uint32_t *two,
                        int parts, int by_four, int fetch) {
    int64_t size = parts * BYTES, limit = 32767 / c->range & ~(LBQ_GROUP - 1);
    const uint8_t *rows = c->bytes + block * (c->kh * c->kw * c->inputs + 1) * size;
    const uint16_t *ids = p->ids;
    struct lbq_span soon = p->soon;
    uint32_t weighted[2] = {0};
    vi sums[2][2 * MAX_PARTS][2];
    UNROLL for (int t = 0; t < 2; t++)
        UNROLL for (int v = 0; v < 2 * parts; v++) sums[t][v][0] = sums[t][v][1] = (vi){0};
    for (int l = 0; l < c->pair_lists; l += 2) {
        int last = l + 1 == c->pair_lists;
        uint32_t a = c->pair_levels[l], b = last ? 0 : c->pair_levels[l + 1];
        int64_t n[2] = {p->lengths[l], last ? 0 : p->lengths[l + 1]};
        const uint16_t *from[2] = {ids, ids + LBQ_FULL(n[0])};
        vi first = (vi){0} + (int32_t)(a >> 3 | b >> 3 << 16), second = (vi){0} + (int32_t)((a & 7) | (b & 7) << 16);
        weighted[0] += (uint32_t)(n[0] * (a >> 3) + n[1] * (b >> 3));
        weighted[1] += (uint32_t)(n[0] * (a & 7) + n[1] * (b & 7));
        ids = from[1] + LBQ_FULL(n[1]);
        do {
            vw x[2][2 * MAX_PARTS];
            UNROLL for (int i = 0; i < 2; i++) {
                int64_t some = n[i] < limit ? n[i] : limit;
                vw low[MAX_PARTS], high[MAX_PARTS];
                sum_rows(parts, by_four, fetch, rows, size, from[i], some, &soon, low, high);
                UNROLL for (int v = 0; v < parts; v++) x[i][2 * v] = low[v] - (high[v] << 8), x[i][2 * v + 1] = high[v];
                from[i] += LBQ_FULL(some), n[i] -= some;
            }
            UNROLL for (int v = 0; v < 2 * parts; v++)
                UNROLL for (int upper = 0; upper < 2; upper++) {
                    sums[0][v][upper] += weigh(x[0][v], x[1][v], upper, first);
                    sums[1][v][upper] += weigh(x[0][v], x[1][v], upper, second);
                }
        } while (n[0] | n[1]);
    }
    UNROLL for (int t = 0; t < 2; t++) {
        vi bias = (vi){0} + (int32_t)((uint32_t)c->bias * weighted[t]);
        UNROLL for (int v = 0; v < 2 * parts; v++)
            in_order(sums[t][v][0], sums[t][v][1], bias,
                     (t ? two : one) + v / 2 / PER_LINE * 64 + v / 2 % PER_LINE * HALF + v % 2 * 32);
    }
}
#else
/* sums = what low and high hold (fresh), or sums + it; then low and high are empty. */
INLINE void flush_pair(int parts, vw *low, vw *high, int *fresh, uint32_t *sums) {
    uint16_t found[LBQ_MAX_BLOCK];
    unpack(parts, low, high, found);
    if (*fresh)
        for (int j = 0; j < parts * BYTES; j++) sums[j] = found[j];
    else
        for (int j = 0; j < parts * BYTES; j++) sums[j] += found[j];
    UNROLL for (int v = 0; v < parts; v++) low[v] = high[v] = (vw){0};
    *fresh = 0;
}

INLINE void pairs_block(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *one, uint32_t *two,
                        int parts, int by_four, int fetch) {
    int64_t size = parts * BYTES, most = 65535 / c->range, units[2] = {0};
    const uint8_t *rows = c->bytes + block * (c->kh * c->kw * c->inputs + 1) * size;
    const uint16_t *ids = p->ids;
    struct lbq_span soon = p->soon;
    uint32_t weighted[2] = {0}, *sums[2] = {one, two};
    static const int32_t share[8] = {0, 65536, 32768, 21845, 16384, 13107, 10922, 9362}; /* 65536 / level */
    int fresh[2] = {1, 1};
    vw low[2][MAX_PARTS] = {0}, high[2][MAX_PARTS] = {0};
    for (int l = 0; l < c->pair_lists; l++) {
        int level[2] = {c->pair_levels[l] >> 3, c->pair_levels[l] & 7};
        int64_t limit = most * share[level[0] > level[1] ? level[0] : level[1]] >> 16 & ~(LBQ_GROUP - 1);
        for (int64_t n = p->lengths[l], some; n > 0; n -= some) {
            vw x[MAX_PARTS], y[MAX_PARTS];
            some = n < limit ? n : limit;
            sum_rows(parts, by_four, fetch, rows, size, ids, some, &soon, x, y);
            ids += LBQ_FULL(some);
            UNROLL for (int t = 0; t < 2; t++) {
                if (!level[t]) continue;
                if (units[t] + level[t] * some > most) {
                    flush_pair(parts, low[t], high[t], &fresh[t], sums[t]);
                    weighted[t] += (uint32_t)units[t], units[t] = 0;
                }
                units[t] += level[t] * some;
#if defined(LBQ_FOR_NEON)
                if (level[t] == 1) { /* products take longer, and one unit of two */
                    UNROLL for (int v = 0; v < parts; v++) low[t][v] += x[v], high[t][v] += y[v];
                    continue;
                }
#endif
                UNROLL for (int v = 0; v < parts; v++) {
                    low[t][v] += x[v] * (uint16_t)level[t];
                    high[t][v] += y[v] * (uint16_t)level[t];
                }
            }
        }
    }
    UNROLL for (int t = 0; t < 2; t++) {
        flush_pair(parts, low[t], high[t], &fresh[t], sums[t]);
        uint32_t bias = (uint32_t)c->bias * (weighted[t] + (uint32_t)units[t]);
        for (int j = 0; j < size; j++) sums[t][j] -= bias;
    }
}

#endif

static void NAME(pairs)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *one, uint32_t *two) {
    int by_four = c->range <= 255 / LBQ_GROUP;
#if defined(LBQ_FOR_AVX512)
    if (c->block == 128) {
        if (by_four) pairs_block(c, p, block, one, two, 2 * PER_LINE, 1, 0);
        else if (fetches(c)) pairs_block(c, p, block, one, two, 2 * PER_LINE, 0, 1);
        else pairs_block(c, p, block, one, two, 2 * PER_LINE, 0, 0);
        return;
    }
#endif
    if (by_four) pairs_block(c, p, block, one, two, PER_LINE, 1, 1);
    else pairs_block(c, p, block, one, two, PER_LINE, 0, 1);
}
