
int model_run_early(const uint8_t *input, int64_t *logits, model_memory *memory, int *timesteps)
{
    int32_t t;
    if (input == NULL || logits == NULL || memory == NULL || timesteps == NULL)
        return 1;
    for (t = 1; t < MODEL_TIMESTEPS; t++) { /* each time anew: membranes are not kept */
        run_timesteps(input, logits, memory, t, model_net.exit_bias + (size_t)(t - 1) * MODEL_CLASSES);
        if (leads_by_margin(logits, t))
            break;
    }
    *timesteps = (int)t;
    return t < MODEL_TIMESTEPS ? 0 : model_run(input, logits, memory);
}
