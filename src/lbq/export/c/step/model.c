/* Fails to compile where the state is not laid out as model.h says. */
typedef char model_state_is_as_stated[sizeof(model_state) == MODEL_STATE_BYTES ? 1 : -1];

void model_reset(model_state *state)
{
    if (state != NULL)
        state->timesteps = 0; /* the first timestep writes everything before it reads */
}

int model_step(model_state *state, const uint8_t *frame, int64_t *logits)
{
    context run;
    if (state == NULL || frame == NULL || logits == NULL)
        return 1;
    if (state->timesteps < 0 || state->timesteps >= MODEL_TIMESTEPS)
        return 2;
    run.image = frame;
    run.words = state->words;
    run.levels = state->levels;
    run.membranes = state->membranes;
    run.first = state->timesteps;
    run.end = run.first + 1;
    run_stages(&run, state->logits);
    memcpy(logits, state->logits, sizeof state->logits);
    state->timesteps = run.end;
    return 0;
}
