/* Fails to compile where the memory is not laid out as model.h says. */
typedef char model_memory_is_as_stated[sizeof(model_memory) == MODEL_MEMORY_BYTES ? 1 : -1];

/* From zero membranes over the first timesteps; bias: the readout's for so many. */
static void run_timesteps(const uint8_t *input, int64_t *logits, model_memory *memory, int32_t timesteps, const int64_t *bias)
{
    context run;
    run.image = input;
    run.words = memory->words;
    run.levels = memory->levels;
    run.membranes = NULL;
    run.first = 0;
    run.end = timesteps;
    run.last = timesteps - 1;
    memcpy(logits, bias, MODEL_CLASSES * sizeof *logits);
    run_stages(&run, logits);
}

int model_run(const uint8_t *input, int64_t *logits, model_memory *memory)
{
    if (input == NULL || logits == NULL || memory == NULL)
        return 1;
    run_timesteps(input, logits, memory, MODEL_TIMESTEPS, model_net.readout_bias);
    return 0;
}
