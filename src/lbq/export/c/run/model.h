#define MODEL_MEMORY_BYTES @memory_bytes@ /* sizeof(model_memory) */

/* What a run needs besides the constants. It may lie wherever an int32_t may, holds nothing between runs and needs no initial
   value. */
typedef struct {
    int32_t words[@words@];
    uint8_t levels[@levels@];
} model_memory;

/* Classify one input, MODEL_INPUT_BYTES in the order of MODEL_INPUT_SHAPE, pixels as they are stored. Writes
   MODEL_CLASSES logits. Returns 0, or 1 where a pointer is NULL. Calls with memories of their own may run at once. */
int model_run(const uint8_t *input, int64_t *logits, model_memory *memory);
