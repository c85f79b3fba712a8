/* Fails to compile where the memory is not laid out as model.h says. */
typedef char model_memory_is_as_stated[sizeof(model_memory) == MODEL_MEMORY_BYTES ? 1 : -1];

int model_run(const uint8_t *input, int64_t *logits, model_memory *memory)
{
    context run;
    if (input == NULL || logits == NULL || memory == NULL)
        return 1;
    run.image = input;
    run.words = memory->words;
    run.levels = memory->levels;
    run.membranes = NULL;
    run.first = 0;
    run.end = MODEL_TIMESTEPS;
    run.last = MODEL_TIMESTEPS - 1;
    memcpy(logits, model_net.readout_bias, MODEL_CLASSES * sizeof *logits);
    run_stages(&run, logits);
    return 0;
}
