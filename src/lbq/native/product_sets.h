#ifndef LBQ_PRODUCT_SETS_H
#define LBQ_PRODUCT_SETS_H
#include "native.h"

#define LBQ_MOST_PLANES 16 /* of positive levels and of negative ones, 8 bits each */

/* Rows of levels of one head: level i of a row is at[row * its number + step * i]. */
struct lbq_levels {
    const uint8_t *at;
    int64_t row, step;
    int is_signed;
};

/* One head of one image, and memory to work in. */
struct lbq_head {
    struct lbq_levels left, right, value;
    int32_t *out;
    int64_t out_row, out_step;
    int64_t rows, columns, summed, width, columns_pitch, width_pitch;
    int is_linear;
    int32_t left_planes[2], right_planes[2], value_planes[2]; /* that hold bits: of positive levels, of negative ones */
    int32_t *values;  /* [columns][width_pitch], by planes one for each; NULL: there are none */
    int32_t *matrix;  /* [summed][pitch] */
    int32_t *row, *numbers, *places; /* of the longest row */
    int64_t *value_bits;             /* [columns] */
    uint64_t *left_words, *right_words; /* [planes][rows or columns][words] */
};

/* counts: as those of struct lbq_product. */
#define LBQ_PRODUCT(suffix) \
    void lbq_product_dense_##suffix(const struct lbq_head *head); \
    void lbq_product_planes_##suffix(const struct lbq_head *head, int64_t counts[5]);
LBQ_PRODUCT(portable)
LBQ_PRODUCT(avx2)
LBQ_PRODUCT(avx512)
LBQ_PRODUCT(neon)
#endif
