/* The kernels that conv.c puts together, one set for each instruction set. */
#ifndef LBQ_CONV_KERNELS_H
#define LBQ_CONV_KERNELS_H
#include "native.h"

#define LBQ_MAX_BLOCK 128
#define LBQ_SLACK 64 /* entries that a list may be read or written beyond its end */
#define LBQ_GROUP 4  /* weight rows that are added together */
#define LBQ_FULL(n) (((n) + LBQ_GROUP - 1) & ~(int64_t)(LBQ_GROUP - 1)) /* whole groups */
#define LBQ_DENSE_TILE 6
#define LBQ_MAX_TAPS 256 /* and so many rows of taps at most */

/* Lists of active inputs come in slots, each followed by its negative twin where levels are signed:
 * BY_VALUE  one for each level 1..7: its rows are added up once, and their sum to each plane that the level has a bit in;
 * BY_PLANE  one for each plane, the highest first: for levels above 7, and for the backends that shift;
 * BY_PAIR   some pairs of levels up to 7 at two timesteps, never signed, see conv_pairs.h. */
enum lbq_lists { BY_VALUE, BY_PLANE, BY_PAIR };
#define LBQ_LARGEST_VALUE 7
#define LBQ_MAX_SLOTS 64

/* Active inputs of one row of input pixels. Slot s has its entries from ids + s * capacity on, pixel after pixel:
 * pixel * inputs + channel, modulo 2^16, so that the taps of one kernel row are neighbours. Those of pixel x lie between
 * ids + ends[x * slots + s] and ids + ends[(x + 1) * slots + s]. */
struct lbq_row {
    uint16_t *ids;
    int32_t *ends;
};

/* Where a row of output pixels finds its inputs: `rows` rows of them lie under the kernel, and base[i] leads from
 * entries of row i, at x = 0, to weight rows. longest: entries that a pixel has so far met in one row, by slot. */
struct lbq_window {
    int slots, rows;
    struct lbq_row from[LBQ_MAX_TAPS];
    uint16_t base[LBQ_MAX_TAPS];
    int32_t longest[LBQ_MAX_SLOTS];
};

/* Weights that are read soon. While others are added, lines of them are fetched into the second cache: where a network's
 * weights do not fit there, it would wait for most of them. */
struct lbq_span {
    const uint8_t *from, *end;
};

/* What one output pixel has to add: weight rows, slot after slot. Each slot is filled up to whole groups with the row
 * behind the last, which is zero; lengths are those before. */
struct lbq_pixel {
    uint16_t *ids;
    int32_t *lengths;
    struct lbq_span soon;
};

struct lbq_kernels {
    /* The lists of a row of input pixels; returns how many inputs are active. Entries up to LBQ_SLACK beyond the last
     * are overwritten. */
    int64_t (*form)(const struct lbq_conv *c, enum lbq_lists kind, int slots, int64_t capacity, const uint8_t *levels,
                    struct lbq_row to);
    /* The same with instructions that only some CPUs of the set have (LBQ_HAS_COMPRESS), or NULL. */
    int64_t (*form_compressed)(const struct lbq_conv *c, enum lbq_lists kind, int slots, int64_t capacity,
                               const uint8_t *levels, struct lbq_row to);
    /* The same by pairs, from the levels of two timesteps. */
    int64_t (*form_pairs)(const struct lbq_conv *c, int64_t capacity, const uint8_t *one, const uint8_t *two,
                          struct lbq_row to);
    /* The lists of one output pixel, of whose inputs pixels x0..x1-1 lie under the kernel; shift is added to the
     * window's bases, zero fills groups. Returns the number of entries. */
    int64_t (*gather)(struct lbq_window *w, uint16_t shift, uint16_t zero, int64_t x0, int64_t x1,
                      const struct lbq_pixel *to);
    /* Currents of one output pixel and one block of outputs, for the first two kinds of list. */
    void (*run[2])(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums);
    /* The same of two timesteps. */
    void (*pairs)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *one, uint32_t *two);
    /* The same of one timestep, in 32 bits throughout. */
    void (*wide)(const struct lbq_conv *c, const struct lbq_pixel *p, int64_t block, uint32_t *sums);
    /* Currents of a tile of pixels, whose padded inputs begin at `at`, for 64 (16) outputs; line: bytes (values) of one
     * padded row of inputs. */
    void (*dense_quads)(const struct lbq_conv *c, const uint8_t *const at[LBQ_DENSE_TILE], int64_t line, int64_t block,
                        struct lbq_span soon, int32_t sums[LBQ_DENSE_TILE][64]);
    void (*dense_pairs)(const struct lbq_conv *c, const int16_t *const at[LBQ_DENSE_TILE], int64_t line, int64_t block,
                        int32_t sums[LBQ_DENSE_TILE][16]);
};

extern const struct lbq_kernels lbq_kernels_portable, lbq_kernels_avx2, lbq_kernels_avx512, lbq_kernels_neon;
#endif
