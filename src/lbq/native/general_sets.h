#ifndef LBQ_GENERAL_SETS_H
#define LBQ_GENERAL_SETS_H
#include "native.h"

/* One row of output pixels, and memory to work in. */
struct lbq_general_row {
    const struct lbq_general *call;
    const uint8_t *image;
    int64_t y;
    int32_t *out;
    struct lbq_general_tap {
        const uint8_t *levels; /* of the pixel that the tap meets */
        const int16_t *weights;
    } *taps;            /* [kh * kw], those that meet the image */
    int32_t *numbers;   /* [kh * kw * inputs / groups], by planes as many for each: levels, by planes +1 or -1 */
    const int16_t **rows; /* likewise: what is added, weights of one group's outputs */
};

/* counts: accumulations, and those of planes above the lowest. */
#define LBQ_GENERAL(suffix) \
    void lbq_general_dense_##suffix(const struct lbq_general_row *row); \
    void lbq_general_planes_##suffix(const struct lbq_general_row *row, int64_t counts[2]);
LBQ_GENERAL(portable)
LBQ_GENERAL(avx2)
LBQ_GENERAL(avx512)
LBQ_GENERAL(neon)
#endif
