/* The network as tables: model_data.c fills them in, model.c runs them. Not part of the interface, which is model.h. */
#ifndef MODEL_NET_H
#define MODEL_NET_H

#include <stddef.h>
#include <stdint.h>

#include "model.h"

enum { MODEL_PRODUCTS = @products@ }; /* 1: it has attention or gates; 0: a compiler leaves out what these need */

/* What a tensor holds, and where. The image is planar, [frame][channel][row][column], and belongs to the caller. Levels
   lie in `levels`, sums of pooled levels and of products in `words` of the memory, all [frame][row][column][channel]. */
enum { MODEL_IMAGE, MODEL_UNSIGNED_LEVELS, MODEL_SIGNED_LEVELS, MODEL_SUMS };

typedef struct {
    int32_t kind;
    int32_t frames; /* 1: the same at every timestep of a call, else MODEL_TIMESTEPS */
    int32_t channels, height, width;
    size_t offset; /* of its first value */
} model_tensor;

/* A convolution: weights [kernel row][kernel column][input channel of the group][output channel], packed as model_rows.h says,
   or one by one, 8 or 16 bits wide. Or, where identity is not NULL, a residual shortcut, or attention, as model_products.h says:
   one factor per channel. */
typedef struct {
    int32_t source; /* the tensor that it reads; of attention Q */
    const int32_t *identity;
    const int8_t *weights8;
    const int16_t *weights16;
    const uint16_t *packed;
    int32_t bits, longest; /* of a packed weight; of a list of rows: how many may be added before the sum is read */
    int32_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, groups;
} model_synapse;

/* What attention has besides. Tensors: K and V, or K^T V twice. The image stands for what is missing: for V where a neuron
   reads the scores Q K^T, for K where its levels, the source, are multiplied with V. Of other synapses heads is 0. */
typedef struct {
    int32_t keys, values, heads;
} model_attention;

/* Where the target has fewer channels, each is a sum of as many neighbouring ones. */
enum { MODEL_POOL_MAX, MODEL_POOL_SUM };

typedef struct {
    int32_t kind;
    int32_t source, target; /* tensors */
    int32_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
} model_pool;

/* Levels times levels. Tensors: the factor has one position, or as many as the source, and one channel for so many
   neighbouring ones of it. */
typedef struct {
    int32_t factor, source, target;
} model_gate;

/* K^T V of each head. Tensors: the target has a row for each channel of K, and in it a sum for each channel of the head. */
typedef struct {
    int32_t keys, values, target;
} model_product;

/* What is taken off a membrane that has fired: reset, reset times the level, or all of it. Late: at the next timestep,
   after the leak. */
enum { MODEL_RESET_ONCE, MODEL_RESET_LEVEL, MODEL_RESET_HARD, MODEL_RESET_ONCE_LATE, MODEL_RESET_LEVEL_LATE };

typedef struct {
    int32_t target; /* the tensor that it writes */
    int32_t first, count; /* its synapses */
    int32_t fraction; /* fractional bits of the membrane */
    const int32_t *bias; /* [row][column][channel] */
    int32_t bias_columns; /* 0: bias is [channel], the same at every position */
    const uint8_t *bias_row, *bias_column; /* which of bias's each row and column of neurons has; NULL: its own */
    const int32_t *thresholds; /* [n_max][channel], not decreasing */
    const int32_t *reset; /* [channel] */
    int32_t n_max;
    int32_t reset_kind;
    int32_t leak_m, leak_k; /* the membrane is kept times m / 2^k; k = 0: all of it */
    size_t membranes; /* of its first one, among those kept from call to call */
} model_layer;

/* In the order in which they run: layers, and what stands between them. */
enum { MODEL_POOL_STAGE, MODEL_GATE_STAGE, MODEL_PRODUCT_STAGE, MODEL_LAYER_STAGE };

typedef struct {
    int32_t kind, index;
} model_stage;

typedef struct {
    const model_tensor *tensors;
    const model_synapse *synapses;
    const model_pool *pools;
    const model_layer *layers;
    const model_stage *stages;
    int32_t stage_count;
    int32_t readout_first, readout_count; /* its synapses */
    const int64_t *readout_bias; /* [class] */
    const int64_t *exit_bias, *exit_margins; /* [timesteps but the last][class], and [those timesteps]; NULL: no early exit */
    const model_gate *gates;
    const model_product *products;
    const model_attention *attentions; /* [synapse], where MODEL_PRODUCTS is 1 */
} model_network;

extern const model_network model_net;

#endif
