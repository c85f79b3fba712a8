/* The small steps between convolutions and neurons (adding currents up, pooling, the readout), and a whole sequence of
 * steps in one call: between two layers an interpreter would spend more time than some layers take. */
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define ADDED 32768 /* values of a unit */
#define PLACED 64   /* values whose bins are found at a time */

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Currents
 * ------------------------------------------------------------------------------------------------------------------ */

static void add_unit(void *context, int64_t unit) {
    const struct lbq_add *a = context;
    for (int64_t i = unit * ADDED, end = min64(i + ADDED, a->size); i < end;) {
        int64_t at = i % a->period, n = min64(end - i, a->period - at);
        uint32_t *out = (uint32_t *)a->out + i;
        const uint32_t *more = (const uint32_t *)a->more + at;
        for (int64_t j = 0; j < n; j++) out[j] += more[j];
        i += n;
    }
}

static void add(const struct lbq_add *call, int threads) {
    struct lbq_add a = *call;
    lbq_parallel(threads, (a.size + ADDED - 1) / ADDED, add_unit, &a);
}

/* Pooling
 * ------------------------------------------------------------------------------------------------------------------ */

struct window {
    const uint8_t *image;
    int64_t y0, y1, x0, x1;
};

/* The largest levels of a window; signed ones are ordered as bytes once their highest bit is flipped. */
static void largest(const struct lbq_pool *p, struct window w, uint8_t *out) {
    uint8_t flip = p->is_signed ? 0x80 : 0;
    memset(out, 0, (size_t)p->channels);
    for (int64_t y = w.y0; y < w.y1; y++)
        for (int64_t x = w.x0; x < w.x1; x++) {
            const uint8_t *in = w.image + (y * p->width + x) * p->channels;
            for (int64_t c = 0; c < p->channels; c++) {
                uint8_t level = in[c] ^ flip;
                out[c] = level > out[c] ? level : out[c];
            }
        }
    for (int64_t c = 0; c < p->channels; c++) out[c] ^= flip;
}

/* Sums of neighbouring channels at one position, added to what is there. */
static void neighbours(const struct lbq_pool *p, const uint8_t *in, int32_t *wide, uint8_t *bytes) {
    for (int64_t c = 0; c < p->channels; c++) {
        int32_t sum = 0;
        for (int64_t i = 0; i < p->together; i++, in++) sum += p->is_signed ? (int8_t)*in : *in;
        if (wide) wide[c] += sum;
        else bytes[c] += (uint8_t)sum;
    }
}

/* Its sums: in 32 bits, or in bytes, which are right where the sum fits, whatever they were on the way. */
static void sums(const struct lbq_pool *p, struct window w, int32_t *wide, uint8_t *bytes) {
    if (wide) memset(wide, 0, (size_t)p->channels * sizeof *wide);
    else memset(bytes, 0, (size_t)p->channels);
    for (int64_t y = w.y0; y < w.y1; y++)
        for (int64_t x = w.x0; x < w.x1; x++) {
            const uint8_t *in = w.image + (y * p->width + x) * p->channels * p->together;
            if (p->together > 1) neighbours(p, in, wide, bytes);
            else if (!wide)
                for (int64_t c = 0; c < p->channels; c++) bytes[c] += in[c];
            else if (p->is_signed)
                for (int64_t c = 0; c < p->channels; c++) wide[c] += (int8_t)in[c];
            else
                for (int64_t c = 0; c < p->channels; c++) wide[c] += in[c];
        }
}

/* One row of output pixels. */
static void pool_unit(void *context, int64_t unit) {
    const struct lbq_pool *p = context;
    int64_t top = unit % p->out_height * p->stride_y - p->pad_y;
    struct window w = {p->levels + unit / p->out_height * p->height * p->width * p->channels * p->together, max64(top, 0),
                       min64(top + p->kh, p->height), 0, 0};
    for (int64_t i = 0; i < p->out_width; i++) {
        int64_t left = i * p->stride_x - p->pad_x, at = (unit * p->out_width + i) * p->channels;
        w.x0 = max64(left, 0), w.x1 = min64(left + p->kw, p->width);
        if (p->is_sum) sums(p, w, p->wide ? p->wide + at : NULL, p->bytes ? p->bytes + at : NULL);
        else largest(p, w, p->bytes + at);
    }
}

static void pool(const struct lbq_pool *call, int threads) {
    struct lbq_pool p = *call;
    lbq_parallel(threads, p.batch * p.out_height, pool_unit, &p);
}

/* Readout
 * ------------------------------------------------------------------------------------------------------------------ */

/* The logits of one image: a weight row for every set bit of a feature's level, which is summed over time before. Rows of
 * one plane are added up, then Horner; with a single plane every row is shifted instead. */
static int readout_image(const struct lbq_readout *r, int64_t image, int64_t counts[4]) {
    int64_t *planes = calloc((size_t)(r->planes * r->classes), sizeof *planes), *logits = r->logits + image * r->classes;
    if (!planes) return 1;
    for (int64_t f = 0; f < r->features; f++) {
        int64_t level = 0;
        for (int64_t t = 0; t < r->timesteps; t++) {
            int64_t at = (t * r->batch + image) * r->features + f;
            level += r->sums ? r->sums[at] : r->is_signed ? (int8_t)r->levels[at] : r->levels[at];
        }
        const int64_t *row = r->weights + f * r->classes;
        int64_t sign = level < 0 ? -1 : 0; /* (x ^ sign) - sign is +-x */
        counts[3] += level != 0;
        for (uint64_t bits = (uint64_t)((level ^ sign) - sign); bits; bits &= bits - 1) {
            int64_t k = __builtin_ctzll(bits), plane = min64(k, r->planes - 1);
            int64_t factor = (int64_t)1 << (k - plane), *to = planes + plane * r->classes; /* a shift, of negative rows too */
            for (int64_t c = 0; c < r->classes; c++) to[c] += ((row[c] * factor) ^ sign) - sign;
            counts[0] += r->classes, counts[1]++, counts[2] += k ? r->classes : 0;
        }
    }
    for (int64_t c = 0; c < r->classes; c++) {
        int64_t sum = 0;
        for (int64_t k = r->planes - 1; k >= 0; k--) sum = sum * 2 + planes[k * r->classes + c];
        logits[c] = (r->bias ? r->bias[c] : logits[c]) + sum;
    }
    free(planes);
    return 0;
}

static int readout(const struct lbq_readout *r) {
    memset(r->counts, 0, 4 * sizeof *r->counts);
    for (int64_t image = 0; image < r->batch; image++)
        if (readout_image(r, image, r->counts)) return 1;
    return 0;
}

/* Histograms of membranes
 * ------------------------------------------------------------------------------------------------------------------ */

void lbq_histogram(const struct lbq_histogram *h) {
    const double last = (double)(h->bins - 1);
    for (int64_t i = 0; i < h->n; i++)
        for (int64_t first = 0; first < h->channels; first += PLACED) {
            int32_t place[PLACED]; /* found before they are counted: the divisions then go side by side */
            int64_t some = min64(PLACED, h->channels - first);
            for (int64_t c = 0; c < some; c++) {
                double at = (h->values[i * h->channels + first + c] / h->step[first + c] - h->low) / h->width;
                at = at > 0 ? at : 0;
                place[c] = (int32_t)(at < last ? at : last);
            }
            for (int64_t c = 0; c < some; c++) h->counts[place[c]]++;
        }
}

/* Sequences
 * ------------------------------------------------------------------------------------------------------------------ */

/* The first convolution from step i on, or NULL. */
static const struct lbq_conv *next_conv(const struct lbq_step *steps, int64_t i, int64_t n) {
    while (i < n && steps[i].kind != LBQ_STEP_CONV) i++;
    return i < n ? steps[i].call : NULL;
}

int lbq_steps(const struct lbq_step *steps, int64_t n, int32_t threads) {
    for (int64_t i = 0; i < n; i++) {
        const void *call = steps[i].call;
        int failed = 0;
        switch (steps[i].kind) {
            case LBQ_STEP_CONV: failed = lbq_conv(call, threads, next_conv(steps, i + 1, n)); break;
            case LBQ_STEP_NEURON: lbq_neuron(call, threads); break;
            case LBQ_STEP_ADD: add(call, threads); break;
            case LBQ_STEP_POOL: pool(call, threads); break;
            case LBQ_STEP_READOUT: failed = readout(call); break;
            case LBQ_STEP_PRODUCT: failed = lbq_product(call, threads); break;
            case LBQ_STEP_GATE: lbq_gate(call, threads); break;
            case LBQ_STEP_GENERAL: failed = lbq_general(call, threads); break;
        }
        if (failed) return 1;
    }
    return 0;
}
