/* The numbers of roundings and surrogates. */
#ifndef LBQ_BURST_RULES_H
#define LBQ_BURST_RULES_H
#include "native.h"

enum lbq_rounding { ROUND_FLOOR, ROUND_STRICT, ROUND_ROUND, ROUND_TRUNC, ROUND_HALF };
enum lbq_surrogate { RELSG_ET, BOX, BOX_ET, CLIP, ARCTAN, RECTANGULAR, SIGMOID, TRIANGLE };

#define LBQ_BURST_FACE(suffix)                                                                                       \
    void lbq_burst_stretch_##suffix(const struct lbq_burst *c, int backward, int64_t start, int64_t n,               \
                                    const float *step, const float *scale, int per_element, double *const sums[6],   \
                                    float *scratch);                                                                 \
    void lbq_exp_##suffix(const float *x, float *out, int64_t n);
LBQ_BURST_FACE(portable)
LBQ_BURST_FACE(avx2)
LBQ_BURST_FACE(avx512)
LBQ_BURST_FACE(neon)
#endif
