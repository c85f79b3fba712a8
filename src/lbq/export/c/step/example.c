static model_state state; /* not on the stack, which may be too small for it */

static int classify(const uint8_t *input, int64_t *logits)
{
    int t, failed = 0;
    model_reset(&state);
    for (t = 0; t < MODEL_TIMESTEPS && !failed; t++)
        failed = model_step(&state, @frame@, logits);
    return failed;
}
