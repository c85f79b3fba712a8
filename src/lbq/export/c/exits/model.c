
/* Whether the largest logit after so many timesteps, fewer than all, leads the second by their margin. */
static int leads_by_margin(const int64_t *logits, int32_t timesteps)
{
    int64_t first = logits[0] > logits[1] ? logits[0] : logits[1], second = logits[0] > logits[1] ? logits[1] : logits[0];
    int32_t c;
    for (c = 2; c < MODEL_CLASSES; c++)
        if (logits[c] > first) {
            second = first;
            first = logits[c];
        } else if (logits[c] > second)
            second = logits[c];
    return first - second >= model_net.exit_margins[timesteps - 1];
}
