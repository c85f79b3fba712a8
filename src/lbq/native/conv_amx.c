/* The dense method on the matrix unit of newer x86 CPUs (AMX): tiles of 16 x 64 levels times 64 x 16 weights. */
#include "conv_amx.h"

#if defined(LBQ_X86) && defined(__linux__) && defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("amx-tile,amx-int8")))
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM, of the state */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */
#define SIDE 16                   /* rows of a tile, and int32 in one */
#define BYTES 64                  /* of a tile's row */
#define OUTPUTS 32                /* of two tiles of weights */

int lbq_amx_available(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return 0; /* tiles, and 8-bit products of them */
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct config {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* Lines of a span, fetched step by step. */
struct fetch {
    struct lbq_span soon;
    int64_t lines; /* with each step */
};

/* Sums of twice 16 positions, whose levels begin at `one` and `two`, and 32 outputs, `stride` bytes from position to
 * position: four tiles, from two of levels and two of weights. */
static AMX void products(const struct lbq_conv *c, const uint8_t *one, const uint8_t *two, int64_t line, int64_t block,
                         struct fetch *f, int32_t *to_one, int32_t *to_two, int64_t stride) {
    int64_t apart = c->stride_x * c->inputs, chunks = c->inputs / BYTES, size = SIDE * BYTES;
    int64_t each = c->kh * c->kw * chunks * size;
    const int8_t *weights = c->tiles + 2 * block * each;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t ky = 0; ky < c->kh; ky++)
        for (int64_t k = 0; k < c->kw * chunks; k++, weights += size) {
            int64_t at = ky * line + k * BYTES; /* the taps of one kernel row are neighbours */
            for (int64_t i = 0; i < f->lines && f->soon.from < f->soon.end; i++, f->soon.from += BYTES)
                __builtin_prefetch(f->soon.from, 0, 2);
            _tile_loadd(4, one + at, apart);
            _tile_loadd(5, two + at, apart);
            _tile_loadd(6, weights, BYTES);
            _tile_loadd(7, weights + each, BYTES);
            if (c->is_signed) {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 4, 7);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            } else {
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
            }
        }
    _tile_stored(0, to_one, stride);
    _tile_stored(1, to_one + SIDE, stride);
    _tile_stored(2, to_two, stride);
    _tile_stored(3, to_two + SIDE, stride);
}

/* Rows of whole tiles: results go where they belong. */
static AMX void whole_tiles(const struct lbq_conv *c, const uint8_t *levels, int64_t line, int64_t rows, int64_t block,
                            struct fetch *f, int32_t *out) {
    int64_t across = c->out_width / SIDE, last = rows * across - 1;
    for (int64_t i = 0; i <= last; i += 2) {
        int64_t j = i < last ? i + 1 : i; /* an odd one out is computed twice */
        const uint8_t *one = levels + i / across * c->stride_y * line + i % across * SIDE * c->stride_x * c->inputs;
        const uint8_t *two = levels + j / across * c->stride_y * line + j % across * SIDE * c->stride_x * c->inputs;
        int32_t *to = out + block * OUTPUTS;
        products(c, one, two, line, block, f, to + i * SIDE * c->outputs, to + j * SIDE * c->outputs, c->outputs * 4);
    }
}

/* Other rows: at every position of the padded rows, those between two rows of the image included and thrown away, so that
 * positions are equally far apart in memory. */
static AMX void all_positions(const struct lbq_conv *c, const uint8_t *levels, int64_t line, int64_t positions, int64_t block,
                              struct fetch *f, int32_t *out) {
    int32_t sums[2 * SIDE * OUTPUTS] __attribute__((aligned(64)));
    int64_t across = line / c->inputs, apart = c->stride_x * c->inputs;
    int64_t outputs = c->outputs - block * OUTPUTS < OUTPUTS ? c->outputs - block * OUTPUTS : OUTPUTS, y = 0, x = 0;
    for (int64_t first = 0; first < positions; first += 2 * SIDE) {
        const uint8_t *at = levels + first * apart;
        products(c, at, at + SIDE * apart, line, block, f, sums, sums + SIDE * OUTPUTS, 2 * BYTES);
        for (int64_t i = 0; i < 2 * SIDE && first + i < positions; i++, x++) {
            if (x == across) x = 0, y++;
            if (x < c->out_width)
                memcpy(out + (y * c->out_width + x) * c->outputs + block * OUTPUTS, sums + i * OUTPUTS,
                       (size_t)outputs * sizeof *out);
        }
    }
}

AMX void lbq_amx_rows(const struct lbq_conv *c, const uint8_t *levels, int64_t line, int64_t rows, int64_t block,
                      struct lbq_span soon, int32_t *out) {
    int whole = c->out_width % SIDE == 0 && c->outputs % OUTPUTS == 0;
    int64_t positions = whole ? rows * c->out_width : (rows - 1) * (line / c->inputs) + c->out_width;
    int64_t steps = (positions + 2 * SIDE - 1) / (2 * SIDE) * c->kh * c->kw * (c->inputs / BYTES);
    struct fetch f = {soon, ((soon.end - soon.from) / BYTES + steps - 1) / steps};
    struct config tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.row_bytes[i] = BYTES, tiles.rows[i] = SIDE;
    _tile_loadconfig(&tiles);
    if (whole) whole_tiles(c, levels, line, rows, block, &f, out);
    else all_positions(c, levels, line, positions, block, &f, out);
    _tile_release();
}
#else
int lbq_amx_available(void) { return 0; }
void lbq_amx_rows(const struct lbq_conv *c, const uint8_t *levels, int64_t line, int64_t rows, int64_t block,
                  struct lbq_span soon, int32_t *out) {
    (void)c, (void)levels, (void)line, (void)rows, (void)block, (void)soon, (void)out;
}
#endif
