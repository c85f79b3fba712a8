/* Runs an integer spiking network. C99; no allocation, no floating point, no state but what the caller keeps.

   Layers run one after the other, each over all timesteps of a call, position by position: for a whole layer only levels
   (one byte each) are kept, currents for the channels of one position. At every timestep

       U = leak(V) + (sum of W * S) * 2^fraction + bias + (sum of identity * S) + (sum of factor * (Q K^T) V)
       S = how many thresholds U reaches;   V = U - reset where S is not 0

   The exporter has proved that no sum here, in any order, leaves int32 (in the readout: int64). */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "model.h"
#include "model_levels.h"
#include "model_net.h"
#include "model_products.h"
#include "model_rows.h"

/* Comes before each layer and pool, so that a long run can feed a watchdog or let others run. */
#ifndef LBQ_BEFORE_LAYER
#define LBQ_BEFORE_LAYER() ((void)0)
#endif

/* Where currents are summed: one of the two, with a value for each output channel. */
typedef struct {
    int32_t *narrow;
    int64_t *wide;
} sums;

/* Synapses ------------------------------------------------------------------------------------------------------------ */

/* Add `count` weights from `row` on, times a level, to the sums from output channel `first` on. */
static void add_row(const model_synapse *synapse, size_t row, int32_t count, int32_t level, sums into, size_t first)
{
    int32_t o;
#define ADD(sum, weights, type)     \
    for (o = 0; o < count; o++) \
    (sum)[first + (size_t)o] += (type)level * (weights)[row + (size_t)o]
    if (synapse->weights8 != NULL && into.wide != NULL)
        ADD(into.wide, synapse->weights8, int64_t);
    else if (synapse->weights8 != NULL)
        ADD(into.narrow, synapse->weights8, int32_t);
    else if (into.wide != NULL)
        ADD(into.wide, synapse->weights16, int64_t);
    else
        ADD(into.narrow, synapse->weights16, int32_t);
#undef ADD
}

/* A convolution's currents at one output position: a row of weights for every input that is not zero. */
static void add_conv(const context *run, const model_synapse *synapse, int32_t frame, int32_t y, int32_t x,
                     int32_t outputs, sums into)
{
    const model_tensor *source = &model_net.tensors[synapse->source];
    const int32_t group_inputs = source->channels / synapse->groups, group_outputs = outputs / synapse->groups;
    const size_t apart = channel_distance(source);
    int32_t ky, kx, group, i;
    for (ky = 0; ky < synapse->kernel_h; ky++) {
        const int32_t row = y * synapse->stride_h + ky * synapse->dilation_h - synapse->padding_h;
        if (row < 0 || row >= source->height)
            continue;
        for (kx = 0; kx < synapse->kernel_w; kx++) {
            const int32_t column = x * synapse->stride_w + kx * synapse->dilation_w - synapse->padding_w;
            const size_t tap = (size_t)(ky * synapse->kernel_w + kx) * (size_t)group_inputs;
            size_t input;
            if (column < 0 || column >= source->width)
                continue;
            input = place(source, frame, row, column);
            for (group = 0; group < synapse->groups; group++) {
                const size_t first = (size_t)group * (size_t)group_outputs;
                for (i = 0; i < group_inputs; i++, input += apart) {
                    const int32_t level = read_level(run, source, input);
                    if (level != 0)
                        add_row(synapse, (tap + (size_t)i) * (size_t)outputs + first, group_outputs, level, into, first);
                }
            }
        }
    }
}

/* The same for packed weights: lists of inputs that are not zero are filled tap after tap, and their rows added together. */
static void add_packed(const context *run, const model_synapse *synapse, int32_t frame, int32_t y, int32_t x,
                       int32_t outputs, int32_t *current)
{
    const model_tensor *source = &model_net.tensors[synapse->source];
    const int32_t inputs = source->channels / synapse->groups, lanes = outputs / synapse->groups / (16 / synapse->bits);
    const uint32_t apart = (uint32_t)(lanes * synapse->groups);
    const int32_t with_sign = source->kind == MODEL_SIGNED_LEVELS;
    int32_t ky, kx, group, i;
    model_list list;
    list.count = 0;
    for (group = 0; group < synapse->groups; group++) {
        int32_t *totals = current + (size_t)group * (size_t)(outputs / synapse->groups);
        for (ky = 0; ky < synapse->kernel_h; ky++) {
            const int32_t row = y * synapse->stride_h + ky * synapse->dilation_h - synapse->padding_h;
            if (row < 0 || row >= source->height)
                continue;
            for (kx = 0; kx < synapse->kernel_w; kx++) {
                const int32_t column = x * synapse->stride_w + kx * synapse->dilation_w - synapse->padding_w;
                uint32_t weights = (uint32_t)((ky * synapse->kernel_w + kx) * inputs) * apart + (uint32_t)(group * lanes);
                const uint8_t *levels;
                if (column < 0 || column >= source->width)
                    continue;
                levels = run->levels + source->offset + place(source, frame, row, column) + group * inputs;
                for (i = 0; i < inputs; i += MODEL_SCAN, weights += MODEL_SCAN * apart) {
                    if (list.count > synapse->longest - MODEL_SCAN)
                        model_flush(synapse->packed, &list, synapse->bits, lanes, totals);
                    if (i + MODEL_SCAN <= inputs)
                        model_append(&list, levels + i, MODEL_SCAN, with_sign, weights, apart);
                    else
                        model_append(&list, levels + i, inputs - i, with_sign, weights, apart);
                }
            }
        }
        model_flush(synapse->packed, &list, synapse->bits, lanes, totals);
    }
}

/* Neurons ------------------------------------------------------------------------------------------------------------- */

/* value * m / 2^k, half rounding up. Complements keep the shift on numbers that are not negative, where C defines it. */
static int32_t leaked(int32_t value, int32_t m, int32_t k)
{
    int64_t product;
    if (k == 0)
        return value;
    product = (int64_t)value * m + ((int64_t)1 << (k - 1));
    return (int32_t)(product >= 0 ? product >> k : ~(~product >> k));
}

/* Of all channels at one position. */
static const int32_t *bias_at(const model_layer *layer, int32_t y, int32_t x)
{
    const size_t row = layer->bias_row != NULL ? layer->bias_row[y] : (size_t)y;
    const size_t column = layer->bias_column != NULL ? layer->bias_column[x] : (size_t)x;
    if (layer->bias_columns == 0)
        return layer->bias;
    return layer->bias + (row * (size_t)layer->bias_columns + column) * (size_t)model_net.tensors[layer->target].channels;
}

/* Add the residual shortcuts and attention to the membranes of one position. */
static void add_shortcuts(const context *run, const model_layer *layer, int32_t t, int32_t y, int32_t x, int32_t channels,
                          int32_t *restrict u)
{
    int32_t c, s;
    for (s = layer->first; s < layer->first + layer->count; s++) {
        const int32_t *factors = model_net.synapses[s].identity;
        const model_tensor *source = &model_net.tensors[model_net.synapses[s].source];
        const size_t here = place(source, t, y, x);
        if (factors == NULL)
            continue;
        if (MODEL_PRODUCTS && model_net.attentions[s].heads > 0) { /* behind what run_neurons has in words */
            int32_t *restrict product = run->words + (run->membranes == NULL ? 3 : 2) * (size_t)channels;
            attend(run, s, t, y, x, product);
            for (c = 0; c < channels; c++)
                u[c] += factors[c] * product[c];
        } else if (source->kind == MODEL_UNSIGNED_LEVELS) {
            const uint8_t *restrict levels = run->levels + source->offset + here;
            for (c = 0; c < channels; c++)
                u[c] += factors[c] * levels[c];
        } else
            for (c = 0; c < channels; c++)
                u[c] += factors[c] * read_level(run, source, here + (size_t)c * channel_distance(source));
    }
}

/* How many thresholds [n_max][channel] each membrane reaches; with_sign: its magnitude, and the level gets its sign. */
static void fire(const int32_t *restrict thresholds, int32_t n_max, int32_t with_sign, int32_t channels,
                 const int32_t *restrict u, uint8_t *restrict levels)
{
    int32_t c, k;
    if (with_sign || MODEL_BRANCHES) {
        for (c = 0; c < channels; c++) {
            const int32_t magnitude = with_sign && u[c] < 0 ? -u[c] : u[c];
            for (k = 0; k < n_max && magnitude >= thresholds[k * channels + c];)
                k++;
            levels[c] = (uint8_t)((with_sign && u[c] < 0 ? 256u - (uint32_t)k : (uint32_t)k) & 255u);
        }
        return;
    }
    memset(levels, 0, (size_t)channels);
    for (k = 0; k < n_max; k++, thresholds += channels)
        for (c = 0; c < channels; c++)
            levels[c] = (uint8_t)(levels[c] + (u[c] >= thresholds[c]));
}

/* What of the membranes U the next timestep begins with: leak(V), or with a late reset leak(U) - reset. */
static void carry(const model_layer *layer, int32_t with_sign, int32_t channels, const int32_t *restrict u,
                  const uint8_t *restrict levels, int32_t *restrict membrane)
{
    const int32_t m = layer->leak_m, k = layer->leak_k, kind = layer->reset_kind;
    const int32_t once = kind == MODEL_RESET_ONCE || kind == MODEL_RESET_ONCE_LATE;
    const int32_t late = kind == MODEL_RESET_ONCE_LATE || kind == MODEL_RESET_LEVEL_LATE;
    int32_t c;
    for (c = 0; c < channels; c++) {
        const int32_t level = with_sign && levels[c] > 127 ? levels[c] - 256 : levels[c];
        const int32_t times = once ? (level > 0) - (level < 0) : level;
        const int32_t off = kind == MODEL_RESET_HARD ? (level != 0 ? u[c] : 0) : layer->reset[c] * times;
        membrane[c] = late ? leaked(u[c], m, k) - off : leaked(u[c] - off, m, k);
    }
}

/* The neurons of one position at one timestep. u: currents, then membranes, [channel]. After a last timestep nothing is
   carried on: no bound is proved for what it would be. */
static void update_neurons(const context *run, const model_layer *layer, int32_t t, int32_t y, int32_t x,
                           int32_t *restrict u, int32_t *restrict membrane)
{
    const model_tensor *target = &model_net.tensors[layer->target];
    const int32_t channels = target->channels, with_sign = target->kind == MODEL_SIGNED_LEVELS;
    const int32_t *bias = bias_at(layer, y, x);
    uint8_t *levels = run->levels + target->offset + place(target, t, y, x);
    const int32_t unit = (int32_t)1 << layer->fraction;
    int32_t c;
    for (c = 0; c < channels; c++)
        u[c] = u[c] * unit + bias[c] + membrane[c];
    add_shortcuts(run, layer, t, y, x, channels, u);
    fire(layer->thresholds, layer->n_max, with_sign, channels, u, levels);
    if (t != run->last)
        carry(layer, with_sign, channels, u, levels, membrane);
}

/* Layers -------------------------------------------------------------------------------------------------------------- */

/* Add the convolutions of what all timesteps of the call share, a static image, or of what each has for itself. */
static void add_convs(const context *run, const model_layer *layer, int32_t shared, int32_t t, int32_t y, int32_t x,
                      int32_t *current)
{
    const int32_t outputs = model_net.tensors[layer->target].channels;
    int32_t s;
    sums into;
    into.narrow = current;
    into.wide = NULL;
    for (s = layer->first; s < layer->first + layer->count; s++) {
        const model_synapse *synapse = &model_net.synapses[s];
        if (synapse->identity != NULL || (model_net.tensors[synapse->source].frames == 1) != shared)
            continue;
        if (synapse->packed != NULL)
            add_packed(run, synapse, t, y, x, outputs, current);
        else
            add_conv(run, synapse, t, y, x, outputs, into);
    }
}

/* The membranes of one position, [channel]. Where one call runs all timesteps, every position uses the same. */
static int32_t *membranes_at(const context *run, const model_layer *layer, int32_t y, int32_t x)
{
    const model_tensor *target = &model_net.tensors[layer->target];
    if (run->membranes == NULL)
        return run->words + 2 * (size_t)target->channels;
    return run->membranes + layer->membranes + place(target, 0, y, x);
}

static void run_neurons(const context *run, const model_layer *layer)
{
    const model_tensor *target = &model_net.tensors[layer->target];
    const size_t channels = (size_t)target->channels, bytes = channels * sizeof(int32_t);
    int32_t *shared = run->words, *current = shared + channels;
    int32_t t, y, x;
    for (y = 0; y < target->height; y++)
        for (x = 0; x < target->width; x++) {
            int32_t *membrane = membranes_at(run, layer, y, x);
            if (run->first == 0)
                memset(membrane, 0, bytes);
            memset(shared, 0, bytes);
            add_convs(run, layer, 1, 0, y, x, shared);
            for (t = run->first; t < run->end; t++) {
                memcpy(current, shared, bytes);
                add_convs(run, layer, 0, t, y, x, current);
                update_neurons(run, layer, t, y, x, current, membrane);
            }
        }
}

/* Add the levels of these timesteps, in 64 bits. */
static void run_readout(const context *run, int64_t *logits)
{
    int32_t s, t, c;
    sums into;
    into.narrow = NULL;
    into.wide = logits;
    for (s = model_net.readout_first; s < model_net.readout_first + model_net.readout_count; s++) {
        const model_synapse *synapse = &model_net.synapses[s];
        const model_tensor *source = &model_net.tensors[synapse->source];
        for (t = run->first; t < run->end; t++) {
            if (synapse->identity == NULL)
                add_conv(run, synapse, t, 0, 0, MODEL_CLASSES, into);
            else
                for (c = 0; c < MODEL_CLASSES; c++)
                    logits[c] += (int64_t)synapse->identity[c] *
                                 read_level(run, source, place(source, t, 0, 0) + (size_t)c);
        }
    }
}

static void run_stages(const context *run, int64_t *logits)
{
    int32_t i;
    for (i = 0; i < model_net.stage_count; i++) {
        const model_stage *stage = &model_net.stages[i];
        LBQ_BEFORE_LAYER();
        if (stage->kind == MODEL_POOL_STAGE)
            run_pooling(run, &model_net.pools[stage->index]);
        else if (MODEL_PRODUCTS && stage->kind == MODEL_GATE_STAGE)
            run_gating(run, &model_net.gates[stage->index]);
        else if (MODEL_PRODUCTS && stage->kind == MODEL_PRODUCT_STAGE)
            run_multiplying(run, &model_net.products[stage->index]);
        else
            run_neurons(run, &model_net.layers[stage->index]);
    }
    run_readout(run, logits);
}

/* Interface ----------------------------------------------------------------------------------------------------------- */

@interface@

int model_best(const int64_t *logits)
{
    int best = 0, c;
    for (c = 1; c < MODEL_CLASSES; c++)
        if (logits[c] > logits[best])
            best = c;
    return best;
}
