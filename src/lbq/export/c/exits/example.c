
/* Where each input stops early, and its logits there. */
static const int stops[EXAMPLES] = {@stops@};
static const int64_t early[EXAMPLES][MODEL_CLASSES] = {
@early@
};

static int classify_early(const uint8_t *input, int64_t *logits); /* the timestep at which it stops; 0: an error */

static int stops_as_expected(void)
{
    static int64_t logits[MODEL_CLASSES];
    int i, same = 0;
    for (i = 0; i < EXAMPLES; i++)
        same += classify_early(inputs[i], logits) == stops[i] && memcmp(logits, early[i], sizeof logits) == 0;
    printf("%d of %d inputs stop early where they should, with the expected logits\n", same, EXAMPLES);
    return same == EXAMPLES;
}
