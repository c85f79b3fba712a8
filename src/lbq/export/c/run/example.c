static model_memory memory; /* not on the stack, which may be too small for it */

static int classify(const uint8_t *input, int64_t *logits)
{
    return model_run(input, logits, &memory);
}
