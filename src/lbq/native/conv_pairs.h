/* Two timesteps at once: a part of the template conv.h.
 *
 * An input has a pair of levels (S1, S2) at two neighbouring timesteps. The weight rows of all inputs with the same pair
 * are added up once, and the sum goes S1 times into the currents of the one timestep and S2 times into those of the other.
 * A pair without a list of its own stands in several lists whose levels have no bit in common and add up to it, such as
 * (5, 3) = (5, 1) + (0, 2): the table says in which.
 *
 * Sums are kept in 16 bits as low and high, as conv.h explains. A row counts as often as its level says, so that
 * 65535 / range units fit, a unit being one row times one level. Before more would come, they go into 32 bits.
 */

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
            if (n == 64) {
                UNROLL for (int i = 0; i < 64; i++) code[i] = (uint8_t)((one[i] & 7) << 3 | (two[i] & 7));
            } else {
                memset(code, 0, sizeof code);
                for (int i = 0; i < n; i++) code[i] = (uint8_t)((one[i] & 7) << 3 | (two[i] & 7));
            }
            one += n, two += n;
            active += __builtin_popcountll(set_bits(code, 7 << 3)) + __builtin_popcountll(set_bits(code, 7));
            int more = 0; /* inputs that stand in a second list */
            for (uint64_t bits = set_bits(code, 0xff); bits; bits &= bits - 1) {
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
                        int parts, int by_four) {
    int64_t size = parts * BYTES, most = 65535 / c->range, units[2] = {0};
    const uint8_t *rows = c->bytes + block * (c->kh * c->kw * c->inputs + 1) * size;
    const uint16_t *ids = p->ids;
    uint32_t weighted[2] = {0}, *sums[2] = {one, two};
    int fresh[2] = {1, 1};
    vw low[2][MAX_PARTS] = {0}, high[2][MAX_PARTS] = {0};
    for (int l = 0; l < c->pair_lists; l++) {
        int level[2] = {c->pair_levels[l] >> 3, c->pair_levels[l] & 7};
        int64_t limit = (most / (level[0] > level[1] ? level[0] : level[1])) & ~(LBQ_GROUP - 1);
        for (int64_t n = p->lengths[l], some; n > 0; n -= some) {
            vw x[MAX_PARTS], y[MAX_PARTS];
            some = n < limit ? n : limit;
            sum_rows(parts, by_four, rows, size, ids, some, x, y);
            ids += LBQ_FULL(some);
            UNROLL for (int t = 0; t < 2; t++) {
                if (!level[t]) continue;
                if (units[t] + level[t] * some > most) {
                    flush_pair(parts, low[t], high[t], &fresh[t], sums[t]);
                    weighted[t] += (uint32_t)units[t], units[t] = 0;
                }
                units[t] += level[t] * some;
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

static void NAME(pairs)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *one, uint32_t *two) {
    int by_four = c->range <= 255 / LBQ_GROUP;
#if defined(LBQ_FOR_AVX512)
    if (c->block == 128) {
        if (by_four) pairs_block(c, p, block, one, two, 2 * PER_LINE, 1);
        else pairs_block(c, p, block, one, two, 2 * PER_LINE, 0);
        return;
    }
#endif
    if (by_four) pairs_block(c, p, block, one, two, PER_LINE, 1);
    else pairs_block(c, p, block, one, two, PER_LINE, 0);
}
