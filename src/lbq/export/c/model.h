/* An integer spiking network.

@described@

   It computes what docs/explanation/integers.md of lbq defines, bit for bit: additions, products with small integers,
   shifts and comparisons; no floating point, no allocation. How accurate it is, this file does not say. */
#ifndef MODEL_H
#define MODEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MODEL_INPUT_SHAPE {@shape@} /* frames, channels, rows, columns */
#define MODEL_INPUT_BYTES @input_bytes@
#define MODEL_INPUT_MAX @input_max@ /* the brightest pixel, or highest count, it was trained on; what is above is not refused */
#define MODEL_TIMESTEPS @timesteps@
#define MODEL_CLASSES @classes@
#define MODEL_WEIGHTS @weights@
#define MODEL_CONSTANT_BYTES @constant_bytes@ /* weights, thresholds and biases, read only */
#define MODEL_LOGIT_SCALE @scale@ /* what one unit of a logit is worth; the network does not use it */

extern const char *const model_class_names[MODEL_CLASSES];

@interface@

/* The class with the largest logit; of equal ones the first. */
int model_best(const int64_t *logits);

#ifdef __cplusplus
}
#endif

#endif
