/* The kernels that conv.c puts together, one set for each instruction set. */
#ifndef LBQ_CONV_KERNELS_H
#define LBQ_CONV_KERNELS_H
#include "native.h"

#define LBQ_MAX_BLOCK 128
#define LBQ_SLACK 32 /* entries that a list may be read or written beyond its end */
#define LBQ_DENSE_TILE 6

/* One output pixel's lists, by slot: for planes from the highest down (or for levels), first what is added, then,
 * where levels are signed, what is subtracted. ids are weight rows; values are levels, for the method LEVEL. */
struct lbq_pixel {
    const uint16_t *ids, *values;
    const int32_t *lengths;
};

struct lbq_kernels {
    /* Channels of one input pixel whose bit is set, for each slot, as a list of at most `capacity` entries. */
    void (*form_planes)(const struct lbq_conv *c, const uint8_t *levels, uint16_t *lists, int64_t capacity,
                        int32_t *lengths);
    /* Channels whose level is not zero, and these levels. */
    void (*form_levels)(const struct lbq_conv *c, const uint8_t *levels, uint16_t *lists, uint16_t *values,
                        int64_t capacity, int32_t *lengths);
    /* Append n entries + base. */
    void (*append)(uint16_t *to, const uint16_t *from, int64_t n, uint16_t base);
    /* Currents of one pixel and one block of outputs. */
    void (*planes)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums);
    void (*levels)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums);
    void (*wide)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums);
    /* Currents of a tile of pixels, whose padded inputs begin at `at`, for 64 (16) outputs; line: bytes (values) of one
     * padded row of inputs. */
    void (*dense_quads)(const struct lbq_conv *c, const uint8_t *const at[LBQ_DENSE_TILE], int64_t line, int64_t block,
                        int32_t sums[LBQ_DENSE_TILE][64]);
    void (*dense_pairs)(const struct lbq_conv *c, const int16_t *const at[LBQ_DENSE_TILE], int64_t line, int64_t block,
                        int32_t sums[LBQ_DENSE_TILE][16]);
};

extern const struct lbq_kernels lbq_kernels_portable, lbq_kernels_avx2, lbq_kernels_avx512, lbq_kernels_neon;
#endif
