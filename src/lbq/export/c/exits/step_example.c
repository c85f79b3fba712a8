
static int classify_early(const uint8_t *input, int64_t *logits)
{
    int t;
    model_reset(&state);
    for (t = 0; t < MODEL_TIMESTEPS; t++)
        if (model_step(&state, @frame@, logits) != 0)
            return 0;
        else if (model_stop(&state, logits))
            break;
    return t + 1;
}
