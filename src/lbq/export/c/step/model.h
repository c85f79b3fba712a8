#define MODEL_STATE_BYTES @memory_bytes@ /* sizeof(model_state) */

/* One input on its way through time, and what a timestep needs besides the constants. It may lie wherever an int64_t may, and
   a copy of it goes on from where it was taken. Its members are for model.c. */
typedef struct {
    int64_t logits[MODEL_CLASSES]; /* so far */
    int32_t timesteps; /* taken so far */
    int32_t membranes[@membranes@];
    int32_t words[@words@];
    uint8_t levels[@levels@];
} model_state;

/* Begin a new input; the first one too. What the state held does not matter. */
void model_reset(model_state *state);

/* One timestep: MODEL_INPUT_BYTES in the order of MODEL_INPUT_SHAPE, pixels as they are stored, of @frame@.
   Writes MODEL_CLASSES logits: after MODEL_TIMESTEPS timesteps those of the input, before that what the timesteps so far add
   to the bias of all. Returns 0; 1 where a pointer is NULL; 2 where the input has had its MODEL_TIMESTEPS, for which alone
   sums are proved to fit: then nothing is changed. Calls with states of their own may run at once. */
int model_step(model_state *state, const uint8_t *frame, int64_t *logits);
