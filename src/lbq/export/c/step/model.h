#define MODEL_ENDLESS @endless@ /* 1: sums are proved to fit however many frames come; 0: for MODEL_TIMESTEPS frames */
#define MODEL_WINDOW @window@ /* logits are of so many of the latest frames */
#define MODEL_STATE_BYTES @memory_bytes@ /* sizeof(model_state) */

/* One input on its way through time, and what a timestep needs besides the constants. It may lie wherever an int64_t may, and
   a copy of it goes on from where it was taken. Its members are for model.c. */
typedef struct {
    int64_t logits[MODEL_CLASSES]; /* so far */
    int64_t window[MODEL_WINDOW][MODEL_CLASSES]; /* what each of the latest frames added to them */
    int32_t timesteps; /* taken so far */
    int32_t membranes[@membranes@];
    int32_t words[@words@];
    uint8_t levels[@levels@];
} model_state;

/* Begin a new input; the first one too. What the state held does not matter. */
void model_reset(model_state *state);

/* One timestep: MODEL_INPUT_BYTES in the order of MODEL_INPUT_SHAPE, pixels as they are stored, of @frame@.
   Writes MODEL_CLASSES logits, of the latest MODEL_WINDOW frames; before there are so many, what the frames so far add to the
   bias of all. Returns 0; 1 where a pointer is NULL; 2 where MODEL_ENDLESS is 0 and the input has had its MODEL_TIMESTEPS:
   then nothing is changed. Calls with states of their own may run at once. */
int model_step(model_state *state, const uint8_t *frame, int64_t *logits);
