/* The template of neuron.c: see there. A tile is LANES channels of one site, or where there are many registers TOGETHER times
 * as many, for all timesteps in registers. */
#include <string.h>
#if defined(LBQ_FOR_AVX512) || defined(LBQ_FOR_AVX2)
#include <immintrin.h>
#elif defined(LBQ_FOR_NEON)
#include <arm_neon.h>
#endif

#include "isa.h"
#include "neuron_sets.h"

#if defined(LBQ_FOR_NEON) || defined(LBQ_FOR_AVX512)
#define TOGETHER 4
#else
#define TOGETHER 1
#endif
#define EACH _Pragma("GCC unroll 4") for (int g = 0; g < together; g++)
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef int64_t vl __attribute__((vector_size(8 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vs __attribute__((vector_size(LANES)));

INLINE vi load(const int32_t *p, int64_t lanes, int32_t fill) {
    vi v = (vi){0} + fill;
    memcpy(&v, p, lanes == LANES ? sizeof v : (size_t)lanes * 4);
    return v;
}

/* By instructions of their own: gcc converts one by one. */
#if defined(LBQ_FOR_AVX512)
INLINE vi from_bytes(vb v, int is_signed) {
    return is_signed ? (vi)_mm512_cvtepi8_epi32((__m128i)v) : (vi)_mm512_cvtepu8_epi32((__m128i)v);
}
INLINE vb to_bytes(vi v) { return (vb)_mm512_cvtepi32_epi8((__m512i)v); }
#elif defined(LBQ_FOR_AVX2)
INLINE vi from_bytes(vb v, int is_signed) {
    __m128i bytes = _mm_cvtsi64_si128((int64_t)v);
    return is_signed ? (vi)_mm256_cvtepi8_epi32(bytes) : (vi)_mm256_cvtepu8_epi32(bytes);
}
INLINE vb to_bytes(vi v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    words = _mm_and_si128(words, _mm_set1_epi16(0xff)); /* the lower byte of each */
    return (vb)_mm_cvtsi128_si64(_mm_packus_epi16(words, words));
}
#elif defined(LBQ_FOR_NEON)
INLINE vi from_bytes(vb v, int is_signed) {
    uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32((uint32_t)v));
    return is_signed ? (vi)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes))))
                     : (vi)vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
}
INLINE vb to_bytes(vi v) {
    uint16x4_t words = vmovn_u32((uint32x4_t)v);
    return (vb)vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
}
#else
INLINE vi from_bytes(vb v, int is_signed) {
    return is_signed ? __builtin_convertvector((vs)v, vi) : __builtin_convertvector(v, vi);
}
INLINE vb to_bytes(vi v) { return __builtin_convertvector(v, vb); }
#endif

INLINE vi load_levels(const uint8_t *p, int64_t lanes, int is_signed) {
    vb v = {0};
    memcpy(&v, p, lanes == LANES ? sizeof v : (size_t)lanes);
    return from_bytes(v, is_signed);
}

INLINE void store(void *p, const void *from, int64_t bytes) { memcpy(p, from, (size_t)bytes); }

/* x where the mask is 0, -x where it is -1. */
INLINE vi with_sign(vi x, vi negative) { return (x ^ negative) - negative; }

/* level + 1 where the size reaches the threshold. */
INLINE vi one_more(vi level, vi size, vi threshold) {
#if defined(LBQ_FOR_AVX512)
    __mmask16 reached = _mm512_cmpge_epi32_mask((__m512i)size, (__m512i)threshold);
    return (vi)_mm512_mask_add_epi32((__m512i)level, reached, (__m512i)level, _mm512_set1_epi32(1));
#else
    return level - (size >= threshold);
#endif
}

INLINE vi leaked(vi v, int32_t m, int32_t k) {
    if (k == 0) return v;
    if (m == 1) return (vi)((vu)v + (1u << (k - 1))) >> k; /* |v| is below 2^30, but after the last timestep */
    return __builtin_convertvector((__builtin_convertvector(v, vl) * m + ((int64_t)1 << (k - 1))) >> k, vi);
}

/* What the inner loop asks for: constants in the usual case, which gets code of its own. */
struct kind {
    int64_t n_max;
    int is_signed, reset_kind, decay_reset;
};
static const struct kind usual = {5, 0, RESET_ONCE, 1};

INLINE vi set_bits(vi level, int64_t n_max) {
    if (n_max <= 7) return level - (level >> 1) - (level >> 2);
    vi pairs = level - (level >> 1 & 0x55), fours = (pairs & 0x33) + (pairs >> 2 & 0x33);
    return (fours & 0x0f) + (fours >> 4);
}

INLINE void tile(const struct lbq_neuron *n, struct kind is, int64_t image, int64_t site, int64_t c, int64_t lanes,
                 int together, vi *active, vi *bits) {
    int64_t channels = n->channels, step = n->batch * n->sites * channels;
    int64_t first = (image * n->sites + site) * channels + c, at = first;
    const int32_t *current = n->currents ? n->currents + at : NULL;
    const int32_t *biases = n->bias + (n->bias_map ? site * channels : 0) + c;
    vi bias[TOGETHER], reset[TOGETHER], v[TOGETHER], pending[TOGETHER];
    EACH bias[g] = load(biases + g * LANES, lanes, 0), reset[g] = load(n->reset + c + g * LANES, lanes, 0);
    EACH v[g] = pending[g] = (vi){0};
    if (n->carried) EACH pending[g] = (vi)(-(vu)load(n->carried + at + g * LANES, lanes, 0));
    for (int64_t t = 0; t < n->timesteps; t++, at += step) {
        vi u[TOGETHER];
        EACH u[g] = bias[g] + leaked(v[g], n->leak_m, n->leak_k) - pending[g];
        if (current) {
            EACH u[g] += (vi)((vu)load(current + g * LANES, lanes, 0) << n->fraction);
            if (!n->is_static) current += step;
        }
        for (int64_t i = 0; i < n->identities; i++)
            EACH u[g] += load(n->identity_weights[i] + c + g * LANES, lanes, 0) *
                         load_levels(n->identity_levels[i] + at + g * LANES, lanes, n->identity_signed[i]);
        for (int64_t i = 0; i < n->products; i++)
            EACH u[g] += load(n->product_weights[i] + c + g * LANES, lanes, 0) *
                         load(n->product_sums[i] + at + g * LANES, lanes, 0);
        if (n->membranes) EACH store(n->membranes + at + g * LANES, &u[g], lanes * 4);
        EACH {
            vi level = {0}, negative = {0};
            if (is.is_signed) negative = u[g] < 0;
            vi size = is.is_signed ? with_sign(u[g], negative) : u[g];
            const int32_t *threshold = n->thresholds + c + g * LANES;
            _Pragma("GCC unroll 5") for (int64_t k = 0; k < is.n_max; k++, threshold += channels)
                level = one_more(level, size, load(threshold, lanes, INT32_MAX));
            vi fired = level != 0;
            *active -= fired;
            *bits += set_bits(level, is.n_max);
            vi emitted = is.is_signed ? with_sign(level, negative) : level;
            vb bytes = to_bytes(emitted);
            store(n->levels + at + g * LANES, &bytes, lanes);
            if (is.reset_kind == RESET_HARD) {
                v[g] = u[g] & ~fired;
                continue;
            }
            /* unsigned: after the last timestep no bound is proved, nor needed */
            vi drop = is.reset_kind == RESET_LEVEL ? (vi)((vu)reset[g] * (vu)emitted)
                                                      : with_sign(reset[g] & fired, negative);
            v[g] = is.decay_reset ? (vi)((vu)u[g] - (vu)drop) : u[g];
            if (!is.decay_reset) pending[g] = drop;
        }
    }
    if (n->carried) EACH {
        vi next = leaked(v[g], n->leak_m, n->leak_k);
        if (!is.decay_reset && is.reset_kind != RESET_HARD) next = (vi)((vu)next - (vu)pending[g]);
        store(n->carried + first + g * LANES, &next, lanes * 4);
    }
}

INLINE void sites(const struct lbq_neuron *n, struct kind is, int64_t first, int64_t last, int64_t counts[2]) {
    vi active = {0}, bits = {0};
    int64_t image = first / n->sites, site = first % n->sites;
    for (int64_t i = first; i < last; i++) {
        int64_t c = 0;
        for (; c + TOGETHER * LANES <= n->channels; c += TOGETHER * LANES)
            tile(n, is, image, site, c, LANES, TOGETHER, &active, &bits);
        for (; c < n->channels; c += LANES)
            tile(n, is, image, site, c, n->channels - c < LANES ? n->channels - c : LANES, 1, &active, &bits);
        if (++site == n->sites) image++, site = 0;
    }
    for (int j = 0; j < LANES; j++) counts[0] += active[j], counts[1] += bits[j];
}

void NAME(lbq_neuron_sites)(const struct lbq_neuron *call, int64_t first, int64_t last, int64_t counts[2]) {
    const struct lbq_neuron own = *call; /* which no store can change: it stays in registers */
    struct kind is = {own.n_max, own.is_signed, own.reset_kind, own.decay_reset};
    if (is.n_max == usual.n_max && !is.is_signed && is.reset_kind == usual.reset_kind && is.decay_reset)
        sites(&own, usual, first, last, counts);
    else
        sites(&own, is, first, last, counts);
}

/* Tallies. */
#define SOME_LEVELS 5  /* that are looked for at a time */
#define MANY_LEVELS 40 /* beyond which they are counted one by one */
typedef uint8_t vc __attribute__((vector_size(4 * LANES)));
typedef int8_t vd __attribute__((vector_size(4 * LANES)));
typedef uint64_t ve __attribute__((vector_size(4 * LANES)));

INLINE vc load_bytes(const uint8_t *p, int64_t bytes, int is_signed) {
    vc v = {0};
    memcpy(&v, p, bytes >= (int64_t)sizeof v ? sizeof v : (size_t)bytes);
    vc negative = is_signed ? (vc)((vd)v < 0) : (vc){0};
    return (v ^ negative) - negative;
}

/* How many bytes are equal to a level. */
INLINE int64_t equal_bytes(vc v, uint8_t level) {
#if defined(LBQ_FOR_AVX512)
    return __builtin_popcountll(_mm512_cmpeq_epi8_mask((__m512i)v, _mm512_set1_epi8((char)level)));
#elif defined(LBQ_FOR_AVX2)
    return __builtin_popcount((uint32_t)_mm256_movemask_epi8((__m256i)(v == level)));
#elif defined(LBQ_FOR_NEON)
    return vaddvq_u8((uint8x16_t)(v == level) & 1);
#else
    ve ones = (ve)(v == level) & 0x0101010101010101u;
    uint64_t sum = 0;
    for (int j = 0; j < LANES / 2; j++) sum += ones[j];
    return (int64_t)(sum * 0x0101010101010101u >> 56);
#endif
}

/* Levels first..first + SOME_LEVELS - 1 at a site; returns how many there were. beyond: is set where one exceeds n_max. */
INLINE int64_t tally_some(const struct lbq_tally *n, const uint8_t *levels, int64_t first, int64_t *counts, vc *beyond) {
    int64_t found[SOME_LEVELS] = {0};
    for (int64_t b = 0; b < n->batch; b++)
        for (int64_t c = 0; c < n->channels; c += 4 * LANES) {
            vc v = load_bytes(levels + b * n->sites * n->channels + c, n->channels - c, n->is_signed);
            *beyond |= (vc)(v > (uint8_t)n->n_max);
            for (int k = 0; k < SOME_LEVELS; k++) found[k] += equal_bytes(v, (uint8_t)(first + k));
        }
    int64_t sum = 0;
    for (int k = 0; k < SOME_LEVELS && first + k <= n->n_max; k++) counts[first + k] += found[k], sum += found[k];
    return sum;
}

int NAME(lbq_tally_sites)(const struct lbq_tally *call, int64_t first, int64_t last) {
    const struct lbq_tally own = *call, *n = &own;
    vc beyond = {0};
    for (int64_t i = first; i < last; i++) {
        const uint8_t *levels = n->levels + (i / n->sites * n->batch * n->sites + i % n->sites) * n->channels;
        int64_t *counts = n->counts + i * (n->n_max + 1), total = n->batch * n->channels;
        if (n->n_max > MANY_LEVELS) {
            for (int64_t b = 0; b < n->batch; b++)
                for (int64_t c = 0; c < n->channels; c++) {
                    int level = levels[b * n->sites * n->channels + c];
                    if (n->is_signed && level > 127) level = 256 - level;
                    if (level <= n->n_max) counts[level]++;
                    else beyond[0] = 1;
                }
            continue;
        }
        for (int64_t k = 1; k <= n->n_max; k += SOME_LEVELS) total -= tally_some(n, levels, k, counts, &beyond);
        counts[0] += total;
    }
    int any = 0;
    for (int j = 0; j < 4 * LANES; j++) any |= beyond[j];
    return any;
}
LBQ_END
