/* Products of levels with levels, for model.c: gates, and attention, (Q K^T) V in each head. Not part of the interface, which
   is model.h.

   A head is neighbouring channels, a token a position. Q (K^T V) is the same integers. Where a head has fewer channels than
   there are tokens, it takes fewer products. Then a stage adds up K^T V, and levels of Q choose rows of it as other inputs
   choose rows of weights. Elsewhere (Q K^T) V takes fewer, one score at a time, and needs no memory. Where a neuron reads the
   scores, they are a layer with a row for each query and a column for each key, and its levels A give A V. */
#ifndef MODEL_PRODUCTS_H
#define MODEL_PRODUCTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "model_levels.h"
#include "model_net.h"

static void run_gating(const context *run, const model_gate *gate)
{
    const model_tensor *factor = &model_net.tensors[gate->factor], *source = &model_net.tensors[gate->source];
    const model_tensor *target = &model_net.tensors[gate->target];
    const int32_t shared = source->channels / factor->channels, everywhere = factor->height * factor->width == 1;
    const int32_t frames = target->frames == 1 ? 1 : run->end;
    int32_t t, y, x, c;
    for (t = 0; t < frames; t++)
        for (y = 0; y < target->height; y++)
            for (x = 0; x < target->width; x++) {
                const size_t here = place(target, t, y, x);
                const size_t by = everywhere ? place(factor, t, 0, 0) : place(factor, t, y, x);
                for (c = 0; c < target->channels; c++)
                    write_level(run, target, here + (size_t)c,
                                read_level(run, factor, by + (size_t)(c / shared)) *
                                    read_level(run, source, here + (size_t)c));
            }
}

/* Levels of a position, and the bit that is a sign in them. */
static const uint8_t *levels_at(const context *run, const model_tensor *tensor, int32_t t, int32_t y, int32_t x)
{
    return run->levels + tensor->offset + place(tensor, t, y, x);
}

static uint32_t sign_bit(const model_tensor *tensor)
{
    return tensor->kind == MODEL_SIGNED_LEVELS ? 128 : 0;
}

static int32_t level_of(uint8_t byte, uint32_t sign)
{
    return (int32_t)(byte ^ sign) - (int32_t)sign;
}

static void add_levels(const uint8_t *restrict levels, uint32_t sign, int32_t factor, int32_t count, int32_t *restrict into)
{
    int32_t c;
    for (c = 0; c < count; c++)
        into[c] += factor * level_of(levels[c], sign);
}

static void run_multiplying(const context *run, const model_product *product)
{
    const model_tensor *keys = &model_net.tensors[product->keys], *values = &model_net.tensors[product->values];
    const model_tensor *target = &model_net.tensors[product->target];
    const int32_t depth = target->channels, tokens = keys->height * keys->width;
    const int32_t frames = target->frames == 1 ? 1 : run->end;
    const size_t size = (size_t)depth * (size_t)keys->channels;
    int32_t t, token, i;
    for (t = 0; t < frames; t++) {
        int32_t *const sums = run->words + target->offset + place(target, t, 0, 0);
        const uint8_t *k = levels_at(run, keys, t, 0, 0), *v = levels_at(run, values, t, 0, 0);
        memset(sums, 0, size * sizeof *sums);
        for (token = 0; token < tokens; token++, k += keys->channels, v += keys->channels)
            for (i = 0; i < keys->channels; i++)
                if (k[i] != 0)
                    add_levels(v + (i - i % depth), sign_bit(values), level_of(k[i], sign_bit(keys)), depth,
                               sums + (size_t)i * (size_t)depth);
    }
}

/* Q K^T of one query and one key, [head]. */
static void score(const context *run, const model_tensor *queries, const model_tensor *keys, int32_t heads, int32_t t,
                  int32_t query, int32_t key, int32_t *restrict sums)
{
    const int32_t channels = queries->channels, depth = channels / heads;
    const uint8_t *q = levels_at(run, queries, t, 0, 0) + (size_t)query * (size_t)channels;
    const uint8_t *k = levels_at(run, keys, t, 0, 0) + (size_t)key * (size_t)channels;
    int32_t i;
    memset(sums, 0, (size_t)heads * sizeof *sums);
    for (i = 0; i < channels; i++)
        sums[i / depth] += level_of(q[i], sign_bit(queries)) * level_of(k[i], sign_bit(keys));
}

/* One query's row of A V, [channel], of levels A of scores. */
static void weigh(const context *run, const model_tensor *scores, const model_tensor *values, int32_t t, int32_t query,
                  int32_t *restrict sums)
{
    const int32_t heads = scores->channels, channels = values->channels, depth = channels / heads;
    const uint8_t *a = levels_at(run, scores, t, query, 0), *v = levels_at(run, values, t, 0, 0);
    int32_t key, head;
    memset(sums, 0, (size_t)channels * sizeof *sums);
    for (key = 0; key < scores->width; key++, a += heads, v += channels)
        for (head = 0; head < heads; head++)
            if (a[head] != 0)
                add_levels(v + head * depth, sign_bit(values), level_of(a[head], sign_bit(scores)), depth,
                           sums + head * depth);
}

/* One position's row of a product, [channel]. */
static void attend(const context *run, int32_t synapse, int32_t t, int32_t y, int32_t x, int32_t *restrict sums)
{
    const model_attention *attention = &model_net.attentions[synapse];
    const model_tensor *queries = &model_net.tensors[model_net.synapses[synapse].source];
    const model_tensor *keys = &model_net.tensors[attention->keys], *values = &model_net.tensors[attention->values];
    const int32_t channels = queries->channels, depth = channels / attention->heads;
    const int32_t tokens = queries->height * queries->width;
    const uint8_t *q, *k, *v;
    int32_t first, token, i, c;
    if (values->kind == MODEL_IMAGE) {
        score(run, queries, keys, attention->heads, t, y, x, sums);
        return;
    }
    if (keys->kind == MODEL_IMAGE) {
        weigh(run, queries, values, t, y * values->width + x, sums);
        return;
    }
    q = levels_at(run, queries, t, y, x);
    memset(sums, 0, (size_t)channels * sizeof *sums);
    if (keys->kind == MODEL_SUMS) { /* K^T V */
        const int32_t *restrict row = run->words + keys->offset + place(keys, t, 0, 0);
        for (i = 0; i < channels; i++, row += depth)
            if (q[i] != 0) {
                const int32_t level = level_of(q[i], sign_bit(queries));
                for (c = 0; c < depth; c++)
                    sums[i - i % depth + c] += level * row[c];
            }
        return;
    }
    k = levels_at(run, keys, t, 0, 0);
    v = levels_at(run, values, t, 0, 0);
    for (token = 0; token < tokens; token++, k += channels, v += channels)
        for (first = 0; first < channels; first += depth) {
            int32_t score = 0;
            for (i = first; i < first + depth; i++)
                score += level_of(q[i], sign_bit(queries)) * level_of(k[i], sign_bit(keys));
            if (score != 0)
                add_levels(v + first, sign_bit(values), score, depth, sums + first);
        }
}

#endif
