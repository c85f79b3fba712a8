/* Fails to compile where the state is not laid out as model.h says. */
typedef char model_state_is_as_stated[sizeof(model_state) == MODEL_STATE_BYTES ? 1 : -1];

/* Endless frames are counted to here, then on from MODEL_WINDOW: only the place in the window matters by then. */
enum { MOST_COUNTED = MODEL_ENDLESS ? 2 * MODEL_WINDOW : MODEL_TIMESTEPS };

void model_reset(model_state *state)
{
    if (state != NULL)
        state->timesteps = 0; /* the first timestep writes everything before it reads */
}

int model_step(model_state *state, const uint8_t *frame, int64_t *logits)
{
    context run;
    int64_t *latest;
    int32_t c;
    if (state == NULL || frame == NULL || logits == NULL)
        return 1;
    if (state->timesteps < 0 || state->timesteps >= MOST_COUNTED)
        return 2;
    run.image = frame;
    run.words = state->words;
    run.levels = state->levels;
    run.membranes = state->membranes;
    run.first = state->timesteps;
    run.end = run.first + 1;
    run.last = MODEL_ENDLESS ? -1 : MODEL_TIMESTEPS - 1;
    latest = state->window[run.first % MODEL_WINDOW];
    if (run.first == 0)
        memcpy(state->logits, model_net.readout_bias, sizeof state->logits);
    if (run.first >= MODEL_WINDOW)
        for (c = 0; c < MODEL_CLASSES; c++)
            state->logits[c] -= latest[c];
    memset(latest, 0, sizeof state->window[0]);
    run_stages(&run, latest);
    for (c = 0; c < MODEL_CLASSES; c++)
        state->logits[c] += latest[c];
    memcpy(logits, state->logits, sizeof state->logits);
    state->timesteps = MODEL_ENDLESS && run.end == MOST_COUNTED ? MODEL_WINDOW : run.end;
    return 0;
}
