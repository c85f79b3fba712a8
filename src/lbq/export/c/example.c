/* Runs inputs whose logits are known and compares: exit code 0 where all are the same, 1 otherwise. */
#include <stdio.h>
#include <string.h>

#include "model.h"
@headers@
enum { EXAMPLES = @examples@ };

/* @origin@ */
static const uint8_t inputs[EXAMPLES][@input_size@] = {
@inputs@
};

static const int64_t expected[EXAMPLES][MODEL_CLASSES] = {
@logits@
};

@interface@

static int64_t logits[MODEL_CLASSES]; /* not on the stack: there may be many classes */

int main(void)
{
    int i, same = 0;
    for (i = 0; i < EXAMPLES; i++) {
@before@        if (classify(inputs[i], logits) != 0)
            return 1;
@after@        printf("input %d: %s, logit %lld\n", i, model_class_names[model_best(logits)],
               (long long)logits[model_best(logits)]);
        same += memcmp(logits, expected[i], sizeof logits) == 0;
    }
@end@    printf("%d of %d inputs give the expected logits\n", same, EXAMPLES);
    return same == EXAMPLES@and_early@ ? 0 : 1;
}
