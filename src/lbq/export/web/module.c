/* An exported network as a WebAssembly module: where its input, logits and levels lie, and how to run it. It imports nothing;
   network.js calls it. */
#include <string.h>

#include "model.h"

#define EXPORT(name) __attribute__((export_name(#name)))

static uint8_t input[MODEL_INPUT_BYTES];
static int64_t logits[MODEL_CLASSES];
static model_memory memory;

EXPORT(input) uint8_t *web_input(void)
{
    return input;
}

EXPORT(logits) int64_t *web_logits(void)
{
    return logits;
}

EXPORT(levels) uint8_t *web_levels(void)
{
    return memory.levels;
}

EXPORT(sums) int32_t *web_sums(void)
{
    return memory.words;
}

EXPORT(run) int web_run(void)
{
    return model_run(input, logits, &memory);
}

/* no_builtin: else a compiler makes a call of the function itself out of the loop */
__attribute__((no_builtin)) void *memcpy(void *restrict to, const void *restrict from, size_t count)
{
    uint8_t *target = to;
    const uint8_t *source = from;
    while (count--)
        *target++ = *source++;
    return to;
}

__attribute__((no_builtin)) void *memset(void *to, int value, size_t count)
{
    uint8_t *target = to;
    while (count--)
        *target++ = (uint8_t)value;
    return to;
}
