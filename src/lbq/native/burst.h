/* The burst neuron over a sequence, forward and backward: a template over LANES floats, compiled once per
 * instruction set. What it computes is defined by src/lbq/kernels/reference.py; the names are the same.
 *
 * A column is LANES neighbouring neurons: all their timesteps run in registers, so the membrane never goes to memory.
 * The backward pass recomputes U from x and the state before it. Products are never contracted into fused multiply-adds
 * and r = U / step is a true division, so levels are bit-identical to the reference. Sums for the learned constants run
 * over T in float, then in double, lane i % 16 by lane and block by block: the order is fixed by the shape alone. */
#include <stdlib.h>
#include <string.h>
#if defined(LBQ_FOR_AVX512) || defined(LBQ_FOR_AVX2)
#include <immintrin.h>
#endif

#include "isa.h"
#include "burst_rules.h"

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vs __attribute__((vector_size(2 * LANES)));
typedef float vh __attribute__((vector_size(2 * LANES)));  /* half as many, */
typedef double vd __attribute__((vector_size(4 * LANES))); /* which fill a register as doubles */

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
/* LANES bfloat16, the upper halves of floats; stored ones are rounded to the nearest, ties to even. */
INLINE vf widen(const uint16_t *p) {
    vs v;
    memcpy(&v, p, sizeof v);
    return (vf)(__builtin_convertvector(v, vu) << 16);
}
INLINE void narrow(uint16_t *p, vf v) {
    vu bits = (vu)v, rounded = bits + 0x7fff + (bits >> 16 & 1), missing = (vu)(v != v);
    vs half = __builtin_convertvector(((missing & (bits | 0x400000)) | (~missing & rounded)) >> 16, vs);
    memcpy(p, &half, sizeof half);
}
INLINE vf all(float value) { return value - (vf){0}; }
INLINE vf pick(vi mask, vf yes, vf no) {
#if defined(LBQ_FOR_AVX512)
    return (vf)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)mask), (__m512)no, (__m512)yes);
#elif defined(LBQ_FOR_AVX2)
    return (vf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
#endif
}
INLINE vf only(vi mask, vf yes) { return (vf)(mask & (vi)yes); } /* 0 elsewhere */
/* Limits that keep NaN: a comparison with NaN is false, and then v itself is taken. */
#if defined(LBQ_FOR_AVX512) /* of two operands one of which is NaN, these return the second */
INLINE vf at_most(vf v, vf high) { return (vf)_mm512_min_ps((__m512)high, (__m512)v); }
INLINE vf at_least(vf v, vf low) { return (vf)_mm512_max_ps((__m512)low, (__m512)v); }
#elif defined(LBQ_FOR_AVX2)
INLINE vf at_most(vf v, vf high) { return (vf)_mm256_min_ps((__m256)high, (__m256)v); }
INLINE vf at_least(vf v, vf low) { return (vf)_mm256_max_ps((__m256)low, (__m256)v); }
#else
INLINE vf at_most(vf v, vf high) { return pick(v > high, high, v); }
INLINE vf at_least(vf v, vf low) { return pick(v < low, low, v); }
#endif
INLINE vf truncate_(vf v) { return __builtin_convertvector(__builtin_convertvector(v, vi), vf); } /* |v| < 2^31 */
INLINE vf magnitude(vf v) { return (vf)((vi)v & 0x7fffffff); }
INLINE vf sign_of(vf v) { return only(v > 0, all(1)) - only(v < 0, all(1)); }

/* exp(v) for v <= 0 within 2 ulp; 0 below the normal numbers; NaN stays NaN. 2^n * e^f with |f| <= ln(2) / 2, ln(2)
 * in two parts and a minimax polynomial of degree 7 for e^f. */
INLINE vf exp_(vf v) {
    vi tiny = v < -87.0f;
    vf limited = at_least(v, all(-87.0f));
    vf n = limited * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    vi exponent = (vi)n - 0x4b400000;
    n = n - 12582912.0f;
    vf f = limited - n * 0.693359375f;
    f = f - n * -2.12194440e-4f;
    vf square = f * f; /* in pairs, which do not wait for each other */
    vf high = (1.9875691500e-4f * f + 1.3981999507e-3f) * square + (8.3334519073e-3f * f + 4.1665795894e-2f);
    vf low = 1.6666665459e-1f * f + 5.0000001201e-1f;
    vf p = ((high * square + low) * square + f) + 1.0f;
    vf power = (vf)((exponent + 127) << 23);
    return pick(tiny, all(0), p * power);
}

INLINE vf level_of(vf r, int rounding, float n_max) {
    vf level;
    if (rounding == ROUND_FLOOR) { /* floor, then limits = limits, then truncation */
        level = truncate_(at_most(at_least(r, all(0)), all(n_max)));
    } else if (rounding == ROUND_STRICT) {
        vf limited = at_most(at_least(r, all(0)), all(n_max + 1));
        vf below = truncate_(limited);
        level = at_least(below + only(limited > below, all(1)) - 1, all(0));
    } else if (rounding == ROUND_TRUNC) {
        level = truncate_(at_most(at_least(r, all(-n_max)), all(n_max)));
    } else {
        int odd = rounding == ROUND_HALF;
        vf limited = at_most(odd ? magnitude(r) : at_least(r, all(0)), all(n_max));
        vf below = truncate_(limited);
        level = below + only(limited - below >= 0.5f, all(1));
        if (odd) level = level * sign_of(r);
    }
    return pick(r != r, r, level);
}

/* The indicator or count that the reset subtracts. */
INLINE vf drops_of(vf level, int reset) { return reset == RESET_LEVEL ? level : sign_of(level); }

INLINE vf distance(vf r, float low, float high) { /* min(r - low, high - r, 0) */
    vf left = r - low, right = high - r;
    return at_most(pick(left < right, left, right), all(0));
}

INLINE vf per_threshold_slope(vf r, int surrogate, int n_max) {
    vf total = all(0);
    for (int k = 1; k <= n_max; k++) {
        vf d = r - (float)k;
        if (surrogate == ARCTAN) {
            vf z = 3.14159274f * d;
            total = total + 1.0f / (1.0f + z * z);
        } else if (surrogate == RECTANGULAR) {
            total = total + only((d >= -0.5f) & (d < 0.5f), all(1));
        } else if (surrogate == SIGMOID) {
            vf e = exp_(-magnitude(4.0f * d)), one = 1.0f + e; /* s (1 - s) is even */
            total = total + 4.0f * (e / (one * one));
        } else {
            total = total + at_least(1.0f - magnitude(d), all(0));
        }
    }
    return total;
}

/* B'(m) of the magnitude m, and dB/dlambda where the tail is learned. */
INLINE vf slope_of(vf m, int surrogate, int n_max, float tail, vf *bend) {
    float low = 0, high = (float)n_max;
    if (surrogate == CLIP) {
    } else if (surrogate == RELSG_ET) {
        low = 1;
    } else if (surrogate == BOX || surrogate == BOX_ET) {
        low = 0.5f, high += 0.5f;
    } else {
        return per_threshold_slope(m, surrogate, n_max);
    }
    vi inside = (m >= low) & (m <= high);
    if (surrogate == CLIP || surrogate == BOX) return only(inside, all(1));
    vf decay = exp_(distance(m, low, high));
    /* 1 - decay with the sign of m - low; 0 inside, where decay is exactly 1 */
    if (surrogate == RELSG_ET) *bend = (vf)((vi)(1.0f - decay) ^ ((vi)(m - low) & INT32_MIN));
    return pick(inside, all(1), tail * decay);
}

/* U of the next timestep from the membrane v, a delayed reset and the current x. */
INLINE vf integrate(const struct lbq_burst *c, int reset, int first, vf v, vf pending, vf x) {
    vf u = c->gain * x;
    if (first) return u;
    u = c->leak * v + u;
    return reset != RESET_HARD && !c->decay_reset ? u - pending : u;
}

INLINE vf membrane(const struct lbq_burst *c, int reset, vf u, vf drop) {
    if (reset == RESET_HARD) return u * (1.0f - drop);
    return c->decay_reset ? u - drop : u;
}

struct state {
    vf v, pending;
};

struct emitted { /* by one column: the sum of |S|, and that of their set bits */
    vf sizes, bits;
};

INLINE vf set_bits(vf size, int n_max) {
    vi whole = __builtin_convertvector(size, vi), count = {0};
    for (int bit = 0; n_max >> bit; bit++) count += whole >> bit & 1;
    return __builtin_convertvector(count, vf);
}

INLINE vf load_some(const float *p, int64_t n) { /* the first n, and zeros */
    float lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)n * sizeof(float));
    return load(lanes);
}

/* The state of n <= LANES neurons before the first timestep; at rest, where v is NULL. */
INLINE struct state state_before(const struct lbq_burst *c, int64_t at, int64_t n) {
    struct state before = {all(0), all(0)};
    if (c->v) before.v = load_some(c->v + at, n);
    if (c->pending) before.pending = load_some(c->pending + at, n);
    return before;
}

INLINE void keep_state(const struct lbq_burst *c, int64_t at, int64_t n, struct state after) {
    if (c->v_after) memcpy(c->v_after + at, &after.v, (size_t)n * sizeof(float));
    if (c->pending_after) memcpy(c->pending_after + at, &after.pending, (size_t)n * sizeof(float));
}

INLINE struct state forward_column(const struct lbq_burst *c, int rounding, int reset, const float *x, int64_t x_time,
                                   float *out, int64_t out_time, vf step, vf scale, int rested, struct state before,
                                   struct emitted *sum) {
    vf v = before.v, pending = before.pending;
    vf unit = reset == RESET_HARD ? all(c->alpha) : c->alpha * step;
    for (int64_t t = 0; t < c->timesteps; t++) {
        vf u = integrate(c, reset, t == 0 && rested, v, pending, load(x + t * x_time));
        vf level = level_of(u / step, rounding, (float)c->n_max);
        store(out + t * out_time, scale * level);
        if (sum) {
            sum->sizes += magnitude(level);
            sum->bits += set_bits(magnitude(level), c->n_max);
        }
        vf drops = drops_of(level, reset);
        pending = unit * (reset == RESET_HARD ? magnitude(drops) : drops);
        v = membrane(c, reset, u, pending);
    }
    return (struct state){v, pending};
}

struct columns { /* what one column adds to the learned constants */
    vf step, scale, tail, leak, alpha, gain;
};

/* trace: 4 * LANES floats for each timestep: U, r, level, V. price: the gradient of every |S|. */
INLINE struct columns backward_column(const struct lbq_burst *c, int rounding, int reset, int surrogate, const float *x,
                                      int64_t x_time, const float *grad, float *out, int64_t time, vf step, vf scale,
                                      float *trace, int rested, struct state before, int priced, vf price) {
    vf v = before.v, pending = before.pending;
    vf unit = reset == RESET_HARD ? all(c->alpha) : c->alpha * step;
    for (int64_t t = 0; t < c->timesteps; t++) {
        float *at = trace + t * 4 * LANES;
        vf u = integrate(c, reset, t == 0 && rested, v, pending, load(x + t * x_time));
        vf r = u / step, level = level_of(r, rounding, (float)c->n_max);
        vf drops = drops_of(level, reset);
        pending = unit * (reset == RESET_HARD ? magnitude(drops) : drops);
        v = membrane(c, reset, u, pending);
        store(at, u), store(at + LANES, r), store(at + 2 * LANES, level);
        if (c->need_scalars) store(at + 3 * LANES, v);
    }
    int is_signed = rounding == ROUND_TRUNC || rounding == ROUND_HALF;
    vf inverse = 1.0f / step, next = all(0); /* next: gradient of U[t+1] */
    struct columns sum = {0};
    for (int64_t t = c->timesteps; t-- > 0;) {
        const float *at = trace + t * 4 * LANES;
        vf u = load(at), r = load(at + LANES), level = load(at + 2 * LANES), drops = drops_of(level, reset);
        vf g = load(grad + t * time), bend = all(0);
        vf spikes = g * scale;
        if (priced) spikes += is_signed ? price * sign_of(r) : price;
        vf slope = slope_of(is_signed ? magnitude(r) : r, surrogate, c->n_max, c->tail, &bend);
        vf by_r = spikes * slope, now = by_r * inverse;
        sum.scale += g * level;
        sum.step -= now * r;
        if (c->need_tail) sum.tail += spikes * (is_signed ? bend * sign_of(r) : bend);
        if (t + 1 < c->timesteps) {
            vf carried = c->detach_state ? all(0) : c->leak * next; /* gradient of V[t] */
            vf by_drop = reset != RESET_HARD && !c->decay_reset ? next : carried; /* minus that of the drop */
            if (c->need_scalars) sum.leak += next * load(at + 3 * LANES);
            if (reset == RESET_HARD) {
                vf fired = magnitude(drops);
                now = now + carried * (1.0f - c->alpha * fired);
                if (c->need_scalars) sum.alpha -= carried * u * fired;
            } else {
                now = now + carried;
                if (c->reset_grad) {
                    sum.step -= by_drop * (c->alpha * drops);
                    if (c->need_scalars) sum.alpha -= by_drop * (step * drops);
                }
            }
        }
        if (c->need_scalars) sum.gain += now * load(x + t * x_time);
        if (out) store(out + t * time, c->gain * now);
        next = now;
    }
    if (c->need_scalars && !rested) sum.leak += next * before.v;
    return sum;
}

INLINE void add_lanes(double *into, vf values) {
    float lanes[LANES];
    store(lanes, values);
    for (int half = 0; half < LANES; half += LANES / 2) {
        vh narrow;
        vd total;
        memcpy(&narrow, lanes + half, sizeof narrow);
        memcpy(&total, into + half, sizeof total);
        total += __builtin_convertvector(narrow, vd);
        memcpy(into + half, &total, sizeof total);
    }
}

/* n <= LANES values of x or of a gradient, as floats in a column of zeros, and the other way. */
INLINE void fetch(const struct lbq_burst *c, float *column, const void *values, int64_t at, int64_t n) {
    if (n < LANES) memset(column, 0, LANES * sizeof(float));
    if (!c->bfloat16) {
        memcpy(column, (const float *)values + at, (size_t)n * sizeof(float));
    } else if (n == LANES) {
        store(column, widen((const uint16_t *)values + at));
    } else {
        uint16_t lanes[LANES] = {0};
        memcpy(lanes, (const uint16_t *)values + at, (size_t)n * sizeof(uint16_t));
        store(column, widen(lanes));
    }
}

INLINE void put(const struct lbq_burst *c, const float *column, void *values, int64_t at, int64_t n) {
    if (!c->bfloat16) {
        memcpy((float *)values + at, column, (size_t)n * sizeof(float));
    } else if (n == LANES) {
        narrow((uint16_t *)values + at, load(column));
    } else {
        uint16_t lanes[LANES];
        narrow(lanes, load(column));
        memcpy((uint16_t *)values + at, lanes, (size_t)n * sizeof(uint16_t));
    }
}

/* A stretch of n neighbouring neurons. chunk: there is a state before or after; to look for one at every column would
 * take time. priced: what is emitted is summed, and its gradient is the price. per_element: step and scale are [n], and so
 * are the sums of their gradients; otherwise they hold for the whole stretch and all sums are [16], lane by lane.
 * sums: sizes and bits of what is emitted, or backward step, scale, tail, leak, alpha, gain. scratch: (4 + 3) * LANES floats
 * for each timestep, for the trace and a column that cannot be used where it lies: one that is not full, or not of floats. */
INLINE void stretch(const struct lbq_burst *c, int backward, int chunk, int priced, int rounding, int reset, int surrogate,
                    int64_t start, int64_t n, const float *step, const float *scale, int per_element,
                    double *const sums[6], float *scratch) {
    int rested = !chunk || !c->v;
    int64_t slab = c->outer * c->channels * c->inner;
    float *trace = scratch, *own_x = trace + c->timesteps * 4 * LANES;
    float *own_grad = own_x + c->timesteps * LANES, *own_out = own_grad + c->timesteps * LANES;
    vf one_step = all(per_element ? 1 : *step), one_scale = all(per_element ? 1 : *scale);
    float prices[LANES];
    store(prices, all(priced && backward ? *c->price_at : 0));
    for (int64_t i = 0; i < n; i += LANES) {
        int64_t x_time = c->x_time, time = slab, at = start + i, rest = n - i < LANES ? n - i : LANES;
        int in_place = rest == LANES && !c->bfloat16;
        const float *x = own_x, *grad = own_grad;
        float *out = c->out ? own_out : NULL;
        if (per_element) {
            float steps[LANES], scales[LANES];
            for (int64_t j = 0; j < LANES; j++) {
                steps[j] = j < rest ? step[i + j] : 1;
                scales[j] = j < rest ? scale[i + j] : 1;
            }
            one_step = load(steps), one_scale = load(scales);
        }
        if (in_place) {
            x = (const float *)c->x + at;
            if (backward) grad = (const float *)c->grad + at;
            if (out) out = (float *)c->out + at;
        } else { /* zeros, which fill a last column, add nothing to any sum */
            for (int64_t t = 0; t < c->timesteps; t++) {
                fetch(c, own_x + t * LANES, c->x, at + t * x_time, rest);
                if (backward) fetch(c, own_grad + t * LANES, c->grad, at + t * slab, rest);
            }
            x_time = time = LANES;
        }
        struct state state = {all(0), all(0)};
        int64_t lane = i % 16, own = per_element ? i : lane;
        if (chunk) state = state_before(c, at, rest);
        if (!backward) {
            struct emitted emitted = {all(0), all(0)};
            state = forward_column(c, rounding, reset, x, x_time, out, time, one_step, one_scale, rested, state,
                                   priced ? &emitted : NULL);
            if (chunk) keep_state(c, at, rest, state);
            if (priced) add_lanes(sums[0] + lane, emitted.sizes), add_lanes(sums[1] + lane, emitted.bits);
        } else {
            vf price = priced ? load_some(prices, rest) : all(0); /* none for what only fills the last column */
            struct columns sum = backward_column(c, rounding, reset, surrogate, x, x_time, grad, out, time, one_step,
                                                 one_scale, trace, rested, state, priced, price);
            add_lanes(sums[0] + own, sum.step);
            add_lanes(sums[1] + own, sum.scale);
            if (c->need_tail) add_lanes(sums[2] + lane, sum.tail);
            if (c->need_scalars) {
                add_lanes(sums[3] + lane, sum.leak);
                add_lanes(sums[4] + lane, sum.alpha);
                add_lanes(sums[5] + lane, sum.gain);
            }
        }
        if (!in_place && out)
            for (int64_t t = 0; t < c->timesteps; t++) put(c, own_out + t * LANES, c->out, at + t * slab, rest);
    }
}

/* The paper's neuron gets code of its own; all others share one body that asks at every step which rule it follows. */
INLINE void stretch_by_rule(const struct lbq_burst *c, int backward, int chunk, int priced, int64_t start, int64_t n,
                            const float *step, const float *scale, int per_element, double *const sums[6],
                            float *scratch) {
    if (c->rounding == ROUND_FLOOR && c->reset == RESET_ONCE && c->surrogate == RELSG_ET)
        stretch(c, backward, chunk, priced, ROUND_FLOOR, RESET_ONCE, RELSG_ET, start, n, step, scale, per_element, sums,
                scratch);
    else
        stretch(c, backward, chunk, priced, c->rounding, c->reset, c->surrogate, start, n, step, scale, per_element, sums,
                scratch);
}

void NAME(lbq_burst_stretch)(const struct lbq_burst *c, int backward, int64_t start, int64_t n, const float *step,
                             const float *scale, int per_element, double *const sums[6], float *scratch) {
    int chunk = c->v || c->v_after;
    if (!backward && c->by_level)
        stretch_by_rule(c, 0, 0, 1, start, n, step, scale, per_element, sums, scratch);
    else if (!backward && !chunk)
        stretch_by_rule(c, 0, 0, 0, start, n, step, scale, per_element, sums, scratch);
    else if (!backward)
        stretch_by_rule(c, 0, 1, 0, start, n, step, scale, per_element, sums, scratch);
    else if (c->price_at)
        stretch_by_rule(c, 1, 0, 1, start, n, step, scale, per_element, sums, scratch);
    else if (!chunk)
        stretch_by_rule(c, 1, 0, 0, start, n, step, scale, per_element, sums, scratch);
    else
        stretch_by_rule(c, 1, 1, 0, start, n, step, scale, per_element, sums, scratch);
}

void NAME(lbq_exp)(const float *x, float *out, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        float lanes[LANES] = {0};
        size_t bytes = (size_t)(n - i < LANES ? n - i : LANES) * sizeof(float);
        memcpy(lanes, x + i, bytes);
        store(lanes, exp_(load(lanes)));
        memcpy(out + i, lanes, bytes);
    }
}
LBQ_END
