
static int classify_early(const uint8_t *input, int64_t *logits)
{
    int timesteps;
    return model_run_early(input, logits, &memory, &timesteps) == 0 ? timesteps : 0;
}
