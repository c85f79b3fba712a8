/* Levels in memory, and pools of them, for model.c. Not part of the interface, which is model.h. */
#ifndef MODEL_LEVELS_H
#define MODEL_LEVELS_H

#include <stddef.h>
#include <stdint.h>

#include "model_net.h"

/* Timesteps from `first` up to `end`, and what they read and write. */
typedef struct {
    const uint8_t *image;
    int32_t *words;
    uint8_t *levels;
    int32_t *membranes; /* of all layers, kept from call to call; NULL where one call runs all timesteps */
    int32_t first, end;
    int32_t last; /* the timestep after which nothing is carried on; -1: there is none */
} context;

/* Levels -------------------------------------------------------------------------------------------------------------- */

static int32_t read_level(const context *run, const model_tensor *tensor, size_t index)
{
    switch (tensor->kind) {
    case MODEL_IMAGE:
        return run->image[index];
    case MODEL_UNSIGNED_LEVELS:
        return run->levels[tensor->offset + index];
    case MODEL_SIGNED_LEVELS: {
        const uint8_t byte = run->levels[tensor->offset + index];
        return byte < 128 ? (int32_t)byte : (int32_t)byte - 256;
    }
    default:
        return run->words[tensor->offset + index];
    }
}

static void write_level(const context *run, const model_tensor *tensor, size_t index, int32_t value)
{
    if (tensor->kind == MODEL_SUMS)
        run->words[tensor->offset + index] = value;
    else
        run->levels[tensor->offset + index] = (uint8_t)((uint32_t)value & 255u);
}

/* Of channel 0 at one place; channels are `channel_distance` apart. */
static size_t place(const model_tensor *tensor, int32_t frame, int32_t y, int32_t x)
{
    const size_t area = (size_t)tensor->height * (size_t)tensor->width, channels = (size_t)tensor->channels;
    const size_t first = tensor->frames == 1 ? 0 : (size_t)frame * area * channels;
    const size_t position = (size_t)y * (size_t)tensor->width + (size_t)x;
    return first + (tensor->kind == MODEL_IMAGE ? position : position * channels);
}

static size_t channel_distance(const model_tensor *tensor)
{
    return tensor->kind == MODEL_IMAGE ? (size_t)tensor->height * (size_t)tensor->width : 1;
}

/* Pools --------------------------------------------------------------------------------------------------------------- */

static int32_t pooled(const context *run, const model_pool *pool, int32_t frame, int32_t y, int32_t x, int32_t c)
{
    const model_tensor *source = &model_net.tensors[pool->source];
    const int32_t channels = MODEL_PRODUCTS ? source->channels / model_net.tensors[pool->target].channels : 1;
    int32_t result = 0, empty = 1; /* padding adds nothing and never wins */
    int32_t ky, kx, i;
    for (ky = 0; ky < pool->kernel_h; ky++) {
        const int32_t row = y * pool->stride_h + ky - pool->padding_h;
        if (row < 0 || row >= source->height)
            continue;
        for (kx = 0; kx < pool->kernel_w; kx++) {
            const int32_t column = x * pool->stride_w + kx - pool->padding_w;
            if (column < 0 || column >= source->width)
                continue;
            for (i = c * channels; i < (c + 1) * channels; i++) {
                const int32_t value = read_level(run, source, place(source, frame, row, column) + (size_t)i);
                if (pool->kind == MODEL_POOL_SUM)
                    result += value;
                else if (empty || value > result)
                    result = value;
                empty = 0;
            }
        }
    }
    return result;
}

static void run_pooling(const context *run, const model_pool *pool)
{
    const model_tensor *target = &model_net.tensors[pool->target];
    const int32_t frames = target->frames == 1 ? 1 : run->end;
    int32_t t, y, x, c;
    for (t = 0; t < frames; t++)
        for (y = 0; y < target->height; y++)
            for (x = 0; x < target->width; x++) {
                const size_t here = place(target, t, y, x);
                for (c = 0; c < target->channels; c++)
                    write_level(run, target, here + (size_t)c, pooled(run, pool, t, y, x, c));
            }
}

#endif
