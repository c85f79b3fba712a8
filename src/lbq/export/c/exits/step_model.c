
int model_stop(const model_state *state, int64_t *logits)
{
    const int64_t *bias;
    int32_t c;
    if (state == NULL || logits == NULL || state->timesteps < 1)
        return 0;
    memcpy(logits, state->logits, sizeof state->logits);
    if (state->timesteps >= MODEL_TIMESTEPS)
        return 1;
    bias = model_net.exit_bias + (size_t)(state->timesteps - 1) * MODEL_CLASSES;
    for (c = 0; c < MODEL_CLASSES; c++)
        logits[c] += bias[c] - model_net.readout_bias[c];
    return leads_by_margin(logits, state->timesteps);
}
