/* What the native library's files share: instruction sets, the thread pool, and the library's C face.
 *
 * Every numeric kernel is a template that is compiled once for each instruction set (see isa.h); the functions
 * declared here look at the running CPU and call the widest. All paths and all numbers of threads give the same bytes.
 */
#ifndef LBQ_NATIVE_H
#define LBQ_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels read bytes in little-endian order; without them lbq runs in NumPy and PyTorch"
#endif

#if defined(__x86_64__) || defined(__i386__)
#define LBQ_X86 1
#endif
#if defined(__aarch64__)
#define LBQ_ARM 1
#endif

#if defined(_WIN32)
#define LBQ_EXPORT __declspec(dllexport)
#else
#define LBQ_EXPORT __attribute__((visibility("default")))
#endif

enum lbq_isa { LBQ_PORTABLE = 0, LBQ_AVX2 = 1, LBQ_AVX512 = 2, LBQ_NEON = 3 };

/* What a template gave the name NAME(name) in the instruction set `isa`. */
#if defined(LBQ_X86)
#define LBQ_PICK(isa, name) ((isa) == LBQ_AVX512 ? name##_avx512 : (isa) == LBQ_AVX2 ? name##_avx2 : name##_portable)
#elif defined(LBQ_ARM)
#define LBQ_PICK(isa, name) ((isa) == LBQ_NEON ? name##_neon : name##_portable)
#else
#define LBQ_PICK(isa, name) ((void)(isa), name##_portable)
#endif

/* What a neuron's reset takes away, in training and in engines. */
enum lbq_reset { RESET_ONCE, RESET_LEVEL, RESET_HARD };

/* Bits of `lbq_features`: which instruction paths this CPU can run, and what they may use besides. */
enum lbq_feature {
    LBQ_HAS_AVX2 = 1 << LBQ_AVX2,
    LBQ_HAS_AVX512 = 1 << LBQ_AVX512,
    LBQ_HAS_NEON = 1 << LBQ_NEON,
    LBQ_HAS_VNNI = 1 << 8,
    LBQ_HAS_DOTPROD = 1 << 9,
    LBQ_HAS_COMPRESS = 1 << 10,
    LBQ_HAS_AMX = 1 << 11,
};

/* Run `work(context, unit)` for every unit in 0..units-1 on at most `threads` threads, the caller's included.
 * Which thread runs which unit is not fixed, so a unit writes only what belongs to it. */
typedef void (*lbq_work)(void *context, int64_t unit);
void lbq_parallel(int threads, int64_t units, lbq_work work, void *context);

/* C face, used through ctypes by src/lbq/native/__init__.py and its callers. */
LBQ_EXPORT const char *lbq_source_hash(void);
LBQ_EXPORT int32_t lbq_features(void);

/* One call of the burst neuron over a whole sequence; mirrored by src/lbq/kernels/cpu.py.
 *
 * A timestep is a dense slab of outer * channels * inner values; element i belongs to channel (i / inner) % channels.
 * x may step by any distance between timesteps (0: the same slab at every timestep); everything else is contiguous.
 * x, out and grad are floats, or bfloat16 where `bfloat16` is set; all else is float, and so is all arithmetic. */
struct lbq_burst {
    int64_t timesteps, outer, channels, inner, x_time;
    const void *x;
    const float *step, *scale;     /* [channels]; scale NULL: a level is worth the step */
    void *out;                     /* forward: [T, slab]; backward: gradient of x, or NULL */
    const void *grad;              /* backward: [T, slab] */
    float *by_step, *by_scale;     /* backward: gradients, [channels] */
    float *by_scalars;             /* backward: [4], of tail, leak, alpha, gain */
    const float *v, *pending;      /* the state before, [slab]; v NULL: at rest; pending NULL: nothing is */
    float *v_after;                /* forward: the state after, [slab], or NULL */
    float *pending_after;
    float *by_level;               /* forward: [2], sums of |S| and of their set bits, or NULL; never with a state */
    const float *price_at;         /* backward: the gradient of the first sum, or NULL */
    const float *tail_at, *leak_at, *alpha_at, *gain_at; /* one number each; NULL: 1 */
    float tail, leak, alpha, gain;                       /* the same, which the library itself reads from there */
    int32_t n_max, rounding, reset, surrogate;
    int32_t decay_reset, reset_grad, detach_state, need_tail, need_scalars;
    int32_t bfloat16, threads, isa;
};

/* Both return 0, or 1 where memory ran out. */
LBQ_EXPORT int lbq_burst_forward(const struct lbq_burst *call);
LBQ_EXPORT int lbq_burst_backward(const struct lbq_burst *call);
/* exp of n non-positive floats as the surrogates' tails compute it, for tests. */
LBQ_EXPORT int lbq_exp(const float *x, float *out, int64_t n, int32_t isa);

/* A convolution of 8-bit levels with integer weights, int32 currents; mirrored by src/lbq/engine/convolution.py.
 *
 * levels [batch, height, width, inputs], uint8, or int8 where is_signed; out [batch, out_height, out_width, outputs].
 * A weight row is what one input contributes to all outputs through one tap: row (ky * kw + kx) * inputs + c. Rows are
 * cut into blocks of `block` outputs (64 or 128), the last one filled with zeros. */
struct lbq_conv {
    int64_t batch, height, width, inputs, out_height, out_width, outputs;
    int64_t kh, kw, stride_y, stride_x, pad_y, pad_x, block;
    int64_t apart;           /* pairs: images of one timestep, a divisor of batch */
    const uint8_t *levels;
    int32_t *out;
    const uint8_t *bytes;    /* int8 weights + bias: [blocks, rows + 1, block], the last row 0; see conv.h for the order */
    const int16_t *words;    /* the weights: [blocks, rows, block], where a method adds in 32 bits */
    const int32_t *shifted;  /* weights << k: [planes, blocks, rows, block], where they are shifted beforehand */
    const int8_t *quads;     /* dense, 8 bits: [outputs / 64, taps, inputs / 4, 64, 4] */
    const int16_t *pairs;    /* dense, 16 bits: [outputs / 16, taps, inputs / 2, 16, 2] */
    const int8_t *tiles;     /* dense, 8 bits, matrix unit: [outputs / 16, taps, inputs / 64, 16, 16, 4] */
    const int32_t *totals;   /* quads, signed levels: sum of each output's weights, [outputs] */
    const uint8_t *pair_levels; /* pairs: S1 << 3 | S2 of each list, [pair_lists], see conv_pairs.h */
    const uint8_t *pair_table;  /* lists in which an input with S1 << 3 | S2 stands, then LBQ_NO_LIST: [64, LBQ_MAX_COLUMNS] */
    int64_t *counts;         /* accumulations, formations, shifted accumulations, active inputs, rows added */
    int32_t bias, range;     /* of bytes, which lie in 0..range */
    int32_t planes, largest, is_signed, method, backend, isa;
    int32_t pair_lists, pair_columns; /* lists; the most in which one pair stands */
};
enum lbq_method { LBQ_BITPLANE, LBQ_DENSE, LBQ_PAIRS };
#define LBQ_MAX_COLUMNS 6
#define LBQ_NO_LIST 255
enum lbq_backend { LBQ_HORNER, LBQ_PRESHIFTED, LBQ_FUSED, LBQ_EXPLICIT };
/* 0, or 1 where memory ran out. next: the convolution behind it, whose first weights are fetched meanwhile, or NULL. */
int lbq_conv(const struct lbq_conv *call, int threads, const struct lbq_conv *next);

/* The same of any shape, with groups and dilation; mirrored by src/lbq/engine/general.py. Weights [kh * kw, inputs / groups,
 * outputs], those of an output for the inputs of its group, and LBQ_WIDEST more that are read and not used. planes:
 * LBQ_LEVEL_BITS at most; higher bits of levels are passed over. */
struct lbq_general {
    int64_t batch, height, width, inputs, out_height, out_width, outputs;
    int64_t kh, kw, stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x, groups;
    const uint8_t *levels;
    int32_t *out;
    const int16_t *weights;
    int64_t *counts; /* by planes, as those of a convolution */
    int32_t planes, is_signed, by_planes, isa;
};
#define LBQ_LEVEL_BITS 8
#define LBQ_WIDEST 16 /* numbers of the widest register */
int lbq_general(const struct lbq_general *call, int threads); /* 0, or 1 where memory ran out */

/* Products of levels with levels in each head of each image; mirrored by src/lbq/engine/products.py.
 *
 * out[r, c] = sum over s of left[r, s] right[c, s]; with values, out[r, e] = sum over c of that times values[c, e]. The
 * steps say how far the next image, head, row and number of a row are. */
struct lbq_product {
    int64_t images, heads, rows, columns, summed, width;
    const uint8_t *left, *right, *values; /* values NULL: none */
    int32_t *out;
    const int64_t *left_steps, *right_steps, *values_steps, *out_steps; /* [4] */
    int64_t *counts; /* by planes: ANDs, accumulations, additions, set bits, active levels */
    int32_t left_signed, right_signed, values_signed;
    int32_t is_linear; /* left (right^T values) instead of (left right^T) values */
    int32_t by_planes, isa;
};
int lbq_product(const struct lbq_product *call, int threads); /* 0, or 1 where memory ran out */

/* Levels times levels, [images, sites, channels]; mirrored there too. The factor has as many sites or one, and a divisor of
 * the channels: each for as many neighbouring ones. */
struct lbq_gate {
    int64_t images, sites, channels, factor_sites, factor_channels;
    const uint8_t *factor, *levels;
    uint8_t *out;
    int64_t *counts; /* by planes: pairs of set bits, set bits, active levels */
    int32_t factor_signed, levels_signed, by_planes;
};
void lbq_gate(const struct lbq_gate *call, int threads);

/* A layer of integer neurons over a sequence; mirrored by src/lbq/engine/neuron.py and defined there.
 * Arrays are [T * batch, sites, channels], bias [channels] or [sites, channels], thresholds [n_max, channels]. */
struct lbq_neuron {
    int64_t timesteps, batch, sites, channels, n_max, identities, products;
    const int32_t *currents; /* NULL: none */
    const int32_t *bias, *thresholds, *reset;
    const int32_t *const *identity_weights; /* [identities] of [channels] */
    const uint8_t *const *identity_levels;  /* [identities] of [T * batch, sites, channels] */
    const int32_t *const *product_weights;  /* [products] of [channels] */
    const int32_t *const *product_sums;     /* [products] of [T * batch, sites, channels] */
    uint8_t *levels;
    int64_t *counts; /* levels that are not zero, set bits of their magnitudes */
    const int32_t *identity_signed;
    int32_t *membranes; /* U, or NULL */
    int32_t *carried; /* what the one timestep begins with, then what the next would, or NULL: it begins from rest */
    int32_t is_static, bias_map, fraction, leak_m, leak_k, reset_kind, decay_reset, is_signed, isa;
};
void lbq_neuron(const struct lbq_neuron *call, int threads);

/* The small steps between them; mirrored by src/lbq/engine/steps.py. */
struct lbq_add { /* out[i] += more[i % period] */
    int64_t size, period;
    int32_t *out;
    const int32_t *more;
};
struct lbq_pool { /* levels [batch, height, width, channels * together] to the largest or the sums of windows */
    int64_t batch, height, width, channels, together, out_height, out_width, kh, kw, stride_y, stride_x, pad_y, pad_x;
    const uint8_t *levels;
    uint8_t *bytes; /* [batch, out_height, out_width, channels], or */
    int32_t *wide;  /* sums that need more than 8 bits */
    int32_t is_signed, is_sum; /* sums may add so many neighbouring channels together */
};
struct lbq_readout { /* logits [batch, classes] = bias (or what they are, where that is NULL) + weights x summed levels */
    int64_t timesteps, batch, features, classes, planes; /* planes: accumulators for each class, see steps.c */
    const uint8_t *levels;  /* [T, batch, features], or */
    const int32_t *sums;    /* the same where they need more than 8 bits */
    const int64_t *weights; /* [features, classes] */
    const int64_t *bias;
    int64_t *logits;
    int64_t *counts; /* as those of a convolution */
    int32_t is_signed;
};

/* Steps one after the other; returns 1 where memory ran out, else 0. */
enum lbq_step_kind {
    LBQ_STEP_CONV,
    LBQ_STEP_NEURON,
    LBQ_STEP_ADD,
    LBQ_STEP_POOL,
    LBQ_STEP_READOUT,
    LBQ_STEP_PRODUCT,
    LBQ_STEP_GATE,
    LBQ_STEP_GENERAL
};
struct lbq_step {
    int64_t kind;
    const void *call;
};
LBQ_EXPORT int lbq_steps(const struct lbq_step *steps, int64_t n, int32_t threads);

/* How often each magnitude occurs at each site, over images and channels; mirrored by src/lbq/engine/steps.py.
 * levels [T, batch, sites, channels]; counts [T, sites, n_max + 1], to which it is added. Not 0 where a level exceeded
 * n_max; the counts are then not to be used. */
struct lbq_tally {
    int64_t timesteps, batch, sites, channels, n_max;
    const uint8_t *levels;
    int64_t *counts;
    int32_t is_signed, isa;
};
LBQ_EXPORT int lbq_tally(const struct lbq_tally *call);

/* How many of the values [n, channels], divided by their channel's step, lie in each bin: `width` wide, from `low` on; the
 * first and the last also hold what lies beyond. */
struct lbq_histogram {
    int64_t n, channels, bins;
    const int32_t *values;
    const double *step; /* [channels] */
    int64_t *counts;    /* [bins] */
    double low, width;
};
LBQ_EXPORT void lbq_histogram(const struct lbq_histogram *call);

#endif
