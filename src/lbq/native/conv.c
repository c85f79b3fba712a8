/* A convolution of levels: forms the lists of active inputs, gathers them for every output pixel, and runs the kernels.
 *
 * Images are taken a few at a time. First every input pixel's lists are formed, once; then units of output rows gather
 * them, tile by tile, so that a block of weights serves a whole tile before the next one is fetched. The dense method
 * needs no lists; it reads inputs from a padded copy. */
#include <stdlib.h>
#include <string.h>

#include "conv_amx.h"
#include "conv_kernels.h"

#define LIST_BYTES (1 << 20)  /* for lists formed at a time, for each thread (most of it is never touched) */
#define TILE_IDS (1 << 21)     /* room for the lists of a tile (most of it is never touched) */
#define TILE_PIXELS 256
#define FEW_PIXELS 16          /* where there is only one block: their lists stay in the nearest cache */
#define UNIT_PIXELS 64         /* of a thread by itself */
#define DENSE_PIXELS 256       /* of a unit of the dense method */
#define LINE 64                /* bytes of cache: tiles of levels do not lie across two */
#define TILE_OUTPUTS 32        /* of a block of weights as the dense method reads it: on the matrix unit, */
#define QUAD_OUTPUTS 64        /* by instructions for four products, */
#define PAIR_OUTPUTS 16        /* or for two */
#define MANY_WEIGHTS (1 << 20)
#define REGION_PIXELS 16       /* gathered by one thread, and */
#define CHUNK_PIXELS 32        /* run by one, where threads work together */

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct run {
    const struct lbq_conv *c, *next; /* next: the convolution behind it, or NULL */
    int threads;
    const struct lbq_kernels *k;
    int failed;
    enum lbq_lists kind;
    int slots;
    int64_t (*form)(const struct lbq_conv *, enum lbq_lists, int, int64_t, const uint8_t *, struct lbq_row);
    int64_t total;            /* images, or pairs of them */
    int64_t first, images;    /* of this part of them */
    int64_t capacity;         /* entries of one slot in one row of pixels */
    int64_t rows_each, pixels_each; /* rows of pixels, or output pixels, in a unit */
    int64_t tile, most;       /* output pixels in a tile; entries that one may have */
    int64_t parts;            /* dense: of the outputs */
    int offset;               /* dense: added to each level */
    uint16_t *ids;            /* [images * height, slots, capacity] */
    int32_t *ends;            /* [images * height, width + 1, slots] */
};

static void count(int64_t *total, int64_t more) { __atomic_fetch_add(total, more, __ATOMIC_RELAXED); }

/* How many bits, and how many of planes above 0, an entry of a slot stands for. */
static int64_t bits_of(const struct run *r, int64_t slot, int shifted) {
    int signs = r->c->is_signed ? 2 : 1, value = (int)(slot / signs) + 1;
    if (r->kind == BY_VALUE) return __builtin_popcount((unsigned)(shifted ? value & ~1 : value));
    if (r->kind == BY_PLANE) return !shifted || slot < r->slots - signs; /* plane 0 is the last */
    return shifted ? 0 : __builtin_popcount(r->c->pair_levels[slot]);
}

static struct lbq_row row_of(const struct run *r, int64_t row) {
    int64_t at = row * r->slots * r->capacity;
    struct lbq_row found = {r->ids + at, r->ends + row * r->slots * (r->c->width + 1)};
    return found;
}

/* The image of the first timestep of a pair; the other's is `apart` images on. Images by themselves are what they are. */
static int64_t image_of(const struct run *r, int64_t i) {
    return r->kind == BY_PAIR ? i + i / r->c->apart * r->c->apart : i;
}

/* A unit of input rows: forms their lists. */
static void form_unit(void *context, int64_t unit) {
    struct run *r = context;
    const struct lbq_conv *c = r->c;
    int64_t formed = 0, active = 0, end = min64((unit + 1) * r->rows_each, r->images * c->height);
    for (int64_t row = unit * r->rows_each; row < end; row++) {
        int64_t image = image_of(r, r->first + row / c->height), wide = c->width * c->inputs;
        const uint8_t *levels = c->levels + (image * c->height + row % c->height) * wide;
        struct lbq_row to = row_of(r, row);
        if (r->kind == BY_PAIR) active += r->k->form_pairs(c, r->capacity, levels, levels + c->apart * c->height * wide, to);
        else active += r->form(c, r->kind, r->slots, r->capacity, levels, to);
        for (int s = 0; s < r->slots; s++)
            formed += (to.ends[c->width * r->slots + s] - to.ends[s]) * bits_of(r, s, 0);
    }
    count(&c->counts[1], formed);
    count(&c->counts[3], active);
}

/* Outputs of a block of weights, as the method reads them. */
static int64_t block_outputs(const struct lbq_conv *c) {
    return c->method != LBQ_DENSE ? c->block : c->tiles ? TILE_OUTPUTS : c->quads ? QUAD_OUTPUTS : PAIR_OUTPUTS;
}

static int64_t blocks_of(const struct lbq_conv *c) { return up(c->outputs, block_outputs(c)); }

/* Bytes of such a block of 8-bit weights. */
static int64_t block_bytes(const struct lbq_conv *c) {
    int64_t rows = c->method == LBQ_DENSE ? c->kh * c->kw * up(c->inputs, 4) * 4 : c->kh * c->kw * c->inputs + 1;
    return rows * block_outputs(c);
}

/* A block of weights, or nothing. */
static struct lbq_span block_of(const struct lbq_conv *c, int64_t block) {
    const int8_t *dense = c->tiles ? c->tiles : c->quads;
    const uint8_t *weights = c->method == LBQ_DENSE ? (const uint8_t *)dense : c->bytes;
    if (!weights) return (struct lbq_span){c->levels, c->levels};
    return (struct lbq_span){weights + block * block_bytes(c), weights + (block + 1) * block_bytes(c)};
}

/* How many parts the dense method cuts the outputs into, one for each thread: where the weights are many, no thread reads
 * those of another. Else all threads read all of them. */
static int64_t dense_parts(const struct lbq_conv *c, int threads) {
    return min64(c->outputs * c->inputs * c->kh * c->kw > MANY_WEIGHTS ? threads : 1, blocks_of(c));
}

/* What a thread reads after a block: its next one, or else its first of the next convolution. Each of so many threads takes
 * neighbouring blocks. */
static struct lbq_span soon_after(const struct run *r, int64_t block, int64_t threads) {
    int64_t blocks = blocks_of(r->c), me = block * threads / blocks;
    if ((block + 1) * threads / blocks == me) return block_of(r->c, block + 1);
    if (!r->next) return block_of(r->c, block);
    int shared = r->next->method != LBQ_DENSE || dense_parts(r->next, r->threads) > 1; /* each thread begins elsewhere */
    return block_of(r->next, shared ? me * blocks_of(r->next) / r->threads : 0);
}

/* A part of it, in whole lines. */
static struct lbq_span share_of(struct lbq_span whole, int64_t i, int64_t parts) {
    int64_t lines = (whole.end - whole.from) / LINE;
    return (struct lbq_span){whole.from + lines * i / parts * LINE, whole.from + lines * (i + 1) / parts * LINE};
}

/* Lists of some output pixels, gathered in regions that threads can fill side by side. */
struct lists {
    uint16_t *ids;          /* a region begins at every `stride` entries */
    int32_t *lengths;       /* [pixels, slots] */
    int64_t *starts;        /* of each pixel in ids */
    int64_t region, stride; /* pixels and entries of a region */
    int64_t first, pixels;  /* output pixels that are in it */
};

static int open_lists(const struct run *r, struct lists *l, int64_t regions, int64_t region) {
    const struct lbq_conv *c = r->c;
    l->region = region, l->stride = region * r->most + c->kw * c->inputs + LBQ_SLACK; /* see gather */
    l->ids = malloc((size_t)(regions * l->stride) * sizeof(uint16_t));
    l->lengths = malloc((size_t)(regions * region * r->slots) * sizeof(int32_t));
    l->starts = malloc((size_t)(regions * region) * sizeof(int64_t));
    return l->ids && l->lengths && l->starts;
}

static void close_lists(struct lists *l) { free(l->ids), free(l->lengths), free(l->starts); }

static struct lbq_pixel pixel_of(const struct run *r, const struct lists *l, int64_t i) {
    struct lbq_pixel found = {l->ids + l->starts[i], l->lengths + i * r->slots, {NULL, NULL}};
    return found;
}

/* The rows of inputs that a row of output pixels meets through its valid taps. */
static void open_window(const struct run *r, struct lbq_window *w, int64_t row) {
    const struct lbq_conv *c = r->c;
    int64_t image = row / c->out_height, top = row % c->out_height * c->stride_y - c->pad_y;
    w->slots = r->slots, w->rows = 0;
    for (int64_t ky = max64(0, -top); ky < min64(c->kh, c->height - top); ky++, w->rows++) {
        w->from[w->rows] = row_of(r, image * c->height + top + ky);
        w->base[w->rows] = (uint16_t)(ky * c->kw * c->inputs); /* from pixel * inputs + channel to weight rows */
    }
}

/* Gather the lists of one region's pixels, and count them. */
static void gather_region(const struct run *r, struct lists *l, int64_t region) {
    const struct lbq_conv *c = r->c;
    struct lbq_window w;
    int64_t sums[LBQ_MAX_SLOTS] = {0}, added = 0, shifted = 0, rows = 0;
    int64_t begin = region * l->region, end = min64(begin + l->region, l->pixels), used = region * l->stride;
    int64_t row = (l->first + begin) / c->out_width, x = (l->first + begin) % c->out_width;
    memset(w.longest, 0, sizeof w.longest);
    for (int64_t i = begin; i < end; i++, x++) {
        if (x == c->out_width) x = 0, row++;
        if (i == begin || x == 0) open_window(r, &w, row);
        int64_t left = x * c->stride_x - c->pad_x, x0 = min64(max64(0, left), c->width);
        int64_t x1 = max64(min64(c->width, left + c->kw), x0); /* x0 where the kernel lies beside the image */
        l->starts[i] = used;
        struct lbq_pixel to = pixel_of(r, l, i);
        used += r->k->gather(&w, (uint16_t)(-left * c->inputs), (uint16_t)(c->kh * c->kw * c->inputs), x0, x1, &to);
        for (int s = 0; s < r->slots; s++) sums[s] += to.lengths[s];
    }
    for (int s = 0; s < r->slots; s++) {
        rows += sums[s];
        added += sums[s] * bits_of(r, s, 0);
        shifted += sums[s] * bits_of(r, s, 1);
    }
    count(&c->counts[0], added * c->outputs);
    count(&c->counts[2], shifted * c->outputs);
    count(&c->counts[4], rows * c->outputs);
}

/* Currents of some gathered pixels for one block of outputs. */
static void run_block(const struct run *r, const struct lists *l, int64_t block, int64_t begin, int64_t end) {
    const struct lbq_conv *c = r->c;
    uint32_t sums[2][LBQ_MAX_BLOCK];
    int64_t rest = c->outputs - block * c->block, pixels = c->out_height * c->out_width;
    int64_t later = r->kind == BY_PAIR ? c->apart * pixels * c->outputs : 0; /* the currents of the other timestep */
    struct lbq_span soon = soon_after(r, block, r->threads);
    for (int64_t i = begin; i < end; i++) {
        int64_t at = l->first + i, image = image_of(r, r->first + at / pixels);
        int32_t *out = c->out + (image * pixels + at % pixels) * c->outputs + block * c->block;
        uint32_t *to = rest < c->block ? sums[0] : (uint32_t *)out, *then = rest < c->block ? sums[1] : to + later;
        struct lbq_pixel pixel = pixel_of(r, l, i);
        pixel.soon = share_of(soon, i, l->pixels);
        if (later) r->k->pairs(c, &pixel, block, to, then);
        else (c->bytes ? r->k->run[r->kind] : r->k->wide)(c, &pixel, block, to);
        if (rest >= c->block) continue;
        memcpy(out, sums[0], (size_t)rest * sizeof *out);
        if (later) memcpy(out + later, sums[1], (size_t)rest * sizeof *out);
    }
}

/* A thread by itself: some output pixels, tile by tile, so that a block of weights serves a tile before the next comes. */
static void alone_unit(void *context, int64_t unit) {
    struct run *r = context;
    const struct lbq_conv *c = r->c;
    int64_t pixels = r->images * c->out_height * c->out_width, end = min64((unit + 1) * r->pixels_each, pixels);
    struct lists l = {0};
    if (!open_lists(r, &l, 1, r->tile)) {
        __atomic_store_n(&r->failed, 1, __ATOMIC_RELAXED);
    } else {
        for (l.first = unit * r->pixels_each; l.first < end; l.first += l.pixels) {
            l.pixels = min64(r->tile, end - l.first);
            gather_region(r, &l, 0);
            for (int64_t block = 0; block * c->block < c->outputs; block++) run_block(r, &l, block, 0, l.pixels);
        }
    }
    close_lists(&l);
}

/* Threads together: they gather a tile side by side, then take its blocks of weights from each other, so that each block is
 * fetched by one of them and no timestep's share is larger than another's. */
struct together {
    const struct run *r;
    struct lists l;
    int64_t blocks, chunks;
};

static void gather_unit(void *context, int64_t unit) {
    struct together *t = context;
    gather_region(t->r, &t->l, unit);
}

/* Block by block: a thread's share of the units is neighbours, so it takes as few blocks as can be. */
static void block_unit(void *context, int64_t unit) {
    const struct together *t = context;
    int64_t begin = unit % t->chunks * CHUNK_PIXELS;
    run_block(t->r, &t->l, unit / t->chunks, begin, min64(begin + CHUNK_PIXELS, t->l.pixels));
}

static int run_together(struct run *r) {
    const struct lbq_conv *c = r->c;
    struct together t = {.r = r, .blocks = up(c->outputs, c->block)};
    int64_t pixels = r->images * c->out_height * c->out_width, regions = up(min64(r->tile * r->threads, pixels), REGION_PIXELS);
    int opened = open_lists(r, &t.l, regions, REGION_PIXELS);
    for (; opened && t.l.first < pixels; t.l.first += t.l.pixels) {
        t.l.pixels = min64(regions * REGION_PIXELS, pixels - t.l.first), t.chunks = up(t.l.pixels, CHUNK_PIXELS);
        lbq_parallel(r->threads, up(t.l.pixels, REGION_PIXELS), gather_unit, &t);
        lbq_parallel(r->threads, t.blocks * t.chunks, block_unit, &t);
    }
    close_lists(&t.l);
    return opened;
}

static int run_lists(struct run *r) {
    const struct lbq_conv *c = r->c;
    int signs = c->is_signed ? 2 : 1;
    r->kind = c->method == LBQ_PAIRS ? BY_PAIR : c->bytes && c->largest <= LBQ_LARGEST_VALUE ? BY_VALUE : BY_PLANE;
    r->slots = (r->kind == BY_VALUE ? c->largest : c->planes) * signs;
    r->total = c->batch;
    if (r->kind == BY_PAIR) r->slots = c->pair_lists, r->total = c->batch / c->apart / 2 * c->apart;
    r->form = r->k->form_compressed && lbq_features() & LBQ_HAS_COMPRESS ? r->k->form_compressed : r->k->form;
    r->capacity = c->width * c->inputs + LBQ_SLACK;
    int64_t each = c->height * r->slots * r->capacity * (int64_t)sizeof(uint16_t);
    int64_t together = min64(max64((int64_t)LIST_BYTES * r->threads / max64(each, 1), 1), r->total);
    int64_t rows = together * c->height;
    size_t entries = (size_t)(rows * r->slots * r->capacity + c->kw * c->inputs + LBQ_SLACK); /* see gather */
    r->ids = malloc(entries * sizeof(uint16_t));
    r->ends = malloc((size_t)(rows * r->slots * (c->width + 1) + 1) * sizeof(int32_t));
    r->failed = !r->ids || !r->ends;
    int64_t taken = c->kh * c->kw * c->inputs; /* an input has one value, but as many bits as there are planes */
    int64_t often = r->kind == BY_PLANE ? c->planes : r->kind == BY_PAIR ? c->pair_columns : 1;
    r->most = taken * often + LBQ_GROUP * r->slots;
    int many = c->outputs > c->block;
    r->tile = max64(min64(TILE_IDS / r->most, many ? TILE_PIXELS : FEW_PIXELS), 1);
    for (r->first = 0; r->first < r->total && !r->failed; r->first += together) {
        r->images = min64(together, r->total - r->first);
        int64_t in_rows = r->images * c->height, pixels = r->images * c->out_height * c->out_width;
        r->rows_each = max64(min64(UNIT_PIXELS / max64(c->width, 1), up(in_rows, 4 * r->threads)), 1);
        lbq_parallel(r->threads, up(in_rows, r->rows_each), form_unit, r);
        if (many && r->threads > 1) {
            r->failed = !run_together(r);
        } else {
            r->pixels_each = r->threads > 1 ? UNIT_PIXELS : pixels;
            lbq_parallel(r->threads, up(pixels, r->pixels_each), alone_unit, r);
        }
    }
    free(r->ids), free(r->ends);
    return r->failed;
}

/* Timesteps two by two, and a last one without a partner by planes. */
static int run_pairs(struct run *r) {
    const struct lbq_conv *c = r->c;
    int64_t steps = c->batch / c->apart, paired = steps / 2 * 2 * c->apart;
    struct lbq_conv single = *c;
    single.batch = c->apart, single.method = LBQ_BITPLANE;
    single.levels += paired * c->height * c->width * c->inputs;
    single.out += paired * c->out_height * c->out_width * c->outputs;
    struct run last = {.c = &single, .next = r->next, .threads = r->threads, .k = r->k};
    return (paired && run_lists(r)) || (steps % 2 && run_lists(&last));
}

/* Dense
 * ------------------------------------------------------------------------------------------------------------------ */

/* Levels of input row y of an image with padding, `wide` to a pixel: as bytes (signed ones + 128 where `offset`), or as
 * 16-bit numbers. */
static void padded_row(const struct lbq_conv *c, int64_t image, int64_t y, int64_t wide, int offset, uint8_t *bytes,
                       int16_t *words) {
    int64_t line = (c->width + 2 * c->pad_x) * wide;
    if (bytes) memset(bytes, offset, (size_t)line);
    if (words) memset(words, 0, (size_t)line * sizeof *words);
    if (y < 0 || y >= c->height) return;
    int64_t width = c->width, inputs = c->inputs, is_signed = c->is_signed; /* bytes that are written may be anything's */
    const uint8_t *levels = c->levels + (image * c->height + y) * width * inputs;
    if (bytes && !offset && wide == inputs) {
        memcpy(bytes + c->pad_x * wide, levels, (size_t)(width * inputs));
        return;
    }
    for (int64_t x = 0, at = c->pad_x * wide; x < width; x++, levels += inputs, at += wide) {
        if (bytes)
            for (int64_t i = 0; i < inputs; i++) bytes[at + i] = (uint8_t)(levels[i] + offset);
        else if (is_signed)
            for (int64_t i = 0; i < inputs; i++) words[at + i] = (int8_t)levels[i];
        else
            for (int64_t i = 0; i < inputs; i++) words[at + i] = levels[i];
    }
}

/* What a unit of the dense method works on: some output rows of an image, or some whole images, and a part of the outputs. */
struct dense {
    int64_t image, images, y, rows; /* of the outputs */
    int64_t in_rows, line, wide;    /* padded rows of inputs to an image, numbers in one, and in a pixel */
    int64_t begin, end;             /* blocks of outputs */
    uint8_t *bytes;                 /* those rows of all images, or */
    int16_t *words;
};

/* Tiles of the matrix unit. */
static void dense_tiles(const struct run *r, const struct dense *d, int64_t block, struct lbq_span soon) {
    const struct lbq_conv *c = r->c;
    for (int64_t i = 0; i < d->images; i++) {
        int32_t *out = c->out + ((d->image + i) * c->out_height + d->y) * c->out_width * c->outputs;
        lbq_amx_rows(c, d->bytes + i * d->in_rows * d->line, d->line, d->rows, block, share_of(soon, i, d->images), out);
    }
}

/* A few pixels at a time, by instructions for several products. */
static void dense_pixels(const struct run *r, const struct dense *d, int64_t block, struct lbq_span soon) {
    const struct lbq_conv *c = r->c;
    int64_t width = block_outputs(c), outputs = min64(width, c->outputs - block * width);
    int64_t pixels = d->rows * c->out_width, all = d->images * pixels;
    for (int64_t first = 0; first < all; first += LBQ_DENSE_TILE) {
        int32_t sums8[LBQ_DENSE_TILE][QUAD_OUTPUTS], sums16[LBQ_DENSE_TILE][PAIR_OUTPUTS];
        const uint8_t *at8[LBQ_DENSE_TILE];
        const int16_t *at16[LBQ_DENSE_TILE];
        int32_t *to[LBQ_DENSE_TILE];
        for (int64_t i = 0; i < LBQ_DENSE_TILE; i++) { /* beyond the last pixel: the last one again */
            int64_t image = min64(first + i, all - 1) / pixels, pixel = min64(first + i, all - 1) % pixels;
            int64_t y = pixel / c->out_width, x = pixel % c->out_width;
            int64_t at = (image * d->in_rows + y * c->stride_y) * d->line + x * c->stride_x * d->wide;
            if (d->bytes) at8[i] = d->bytes + at;
            else at16[i] = d->words + at;
            to[i] = c->out + (((d->image + image) * c->out_height + d->y) * c->out_width + pixel) * c->outputs + block * width;
        }
        struct lbq_span part = share_of(soon, first / LBQ_DENSE_TILE, up(all, LBQ_DENSE_TILE));
        if (d->bytes) r->k->dense_quads(c, at8, d->line, block, part, sums8);
        else r->k->dense_pairs(c, at16, d->line, block, sums16);
        for (int64_t i = 0; i < LBQ_DENSE_TILE && first + i < all; i++) {
            const int32_t *sums = d->bytes ? sums8[i] : sums16[i];
            const int32_t *totals = r->offset ? c->totals + block * width : NULL;
            for (int64_t j = 0; j < outputs; j++)
                to[i][j] = totals ? (int32_t)((uint32_t)sums[j] - 128u * (uint32_t)totals[j]) : sums[j];
        }
    }
}

static void dense_unit(void *context, int64_t unit) {
    struct run *r = context;
    const struct lbq_conv *c = r->c;
    int64_t per_image = up(c->out_height, r->rows_each), each = up(c->batch, r->images) * per_image, part = unit / each;
    struct dense d = {.image = unit % each / per_image * r->images, .y = unit % per_image * r->rows_each};
    d.images = min64(r->images, c->batch - d.image), d.rows = min64(r->rows_each, c->out_height - d.y);
    d.begin = part * blocks_of(c) / r->parts, d.end = (part + 1) * blocks_of(c) / r->parts;
    int bytes = c->quads || c->tiles, group = bytes ? 4 : 2;
    d.in_rows = (d.rows - 1) * c->stride_y + c->kh, d.wide = up(c->inputs, group) * group;
    d.line = (c->width + 2 * c->pad_x) * d.wide;
    size_t size = (size_t)(d.images * d.in_rows * d.line), beyond = (size_t)(LBQ_AMX_POSITIONS * c->stride_x * d.wide);
    void *memory = malloc(bytes ? size + (c->tiles ? beyond : 0) + LINE : size * sizeof(int16_t));
    if (!memory) {
        __atomic_store_n(&r->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    d.bytes = bytes ? (uint8_t *)(((uintptr_t)memory + LINE - 1) & ~(uintptr_t)(LINE - 1)) : NULL;
    d.words = bytes ? NULL : memory;
    for (int64_t i = 0, at = 0; i < d.images; i++)
        for (int64_t y = 0; y < d.in_rows; y++, at += d.line)
            padded_row(c, d.image + i, d.y * c->stride_y - c->pad_y + y, d.wide, r->offset, bytes ? d.bytes + at : NULL,
                       bytes ? NULL : d.words + at);
    for (int64_t block = d.begin; block < d.end; block++) {
        struct lbq_span soon = soon_after(r, block, r->parts);
        if (c->tiles) dense_tiles(r, &d, block, soon);
        else dense_pixels(r, &d, block, soon);
    }
    free(memory);
}

/* Whole images go together where they are small: a block of weights then serves them all before the next is fetched. */
static int run_dense(struct run *r) {
    const struct lbq_conv *c = r->c;
    int64_t pixels = c->out_height * c->out_width;
#if defined(LBQ_X86)
    r->offset = c->quads && c->is_signed ? 128 : 0; /* this instruction multiplies unsigned levels by signed weights */
#endif
    r->parts = dense_parts(c, r->threads);
    int64_t sharing = r->threads / r->parts; /* threads for one part of the outputs */
    r->rows_each = max64(min64(DENSE_PIXELS / c->out_width, up(c->batch * c->out_height, sharing)), 1);
    r->rows_each = min64(r->rows_each, c->out_height);
    r->images = r->rows_each < c->out_height ? 1 : max64(min64(DENSE_PIXELS / pixels, up(c->batch, sharing)), 1);
    lbq_parallel(r->threads, r->parts * up(c->batch, r->images) * up(c->out_height, r->rows_each), dense_unit, r);
    return r->failed;
}

int lbq_conv(const struct lbq_conv *c, int threads, const struct lbq_conv *next) {
    struct run r = {.c = c, .next = next, .threads = threads, .k = LBQ_PICK(c->isa, &lbq_kernels)};
    memset(c->counts, 0, 5 * sizeof *c->counts);
    if (c->batch * c->out_height * c->out_width * c->outputs == 0) return 0;
    if (c->method == LBQ_PAIRS) return run_pairs(&r);
    if (c->method != LBQ_DENSE) return run_lists(&r);
    return run_dense(&r);
}
