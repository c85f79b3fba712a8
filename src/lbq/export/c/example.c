/* Runs inputs whose logits are known and compares: exit code 0 where all are the same, 1 otherwise. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model.h"

enum { EXAMPLES = @examples@ };

/* @origin@ */
static const uint8_t inputs[EXAMPLES][@input_size@] = {
@inputs@
};

static const int64_t expected[EXAMPLES][MODEL_CLASSES] = {
@logits@
};

@interface@

int main(void)
{
    int i, same = 0;
    for (i = 0; i < EXAMPLES; i++) {
        int64_t logits[MODEL_CLASSES];
        if (classify(inputs[i], logits) != 0)
            return 1;
        printf("input %d: %s, logit %" PRId64 "\n", i, model_class_names[model_best(logits)],
               logits[model_best(logits)]);
        same += memcmp(logits, expected[i], sizeof logits) == 0;
    }
    printf("%d of %d inputs give the expected logits\n", same, EXAMPLES);
    return same == EXAMPLES ? 0 : 1;
}
