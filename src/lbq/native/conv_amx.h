#ifndef LBQ_CONV_AMX_H
#define LBQ_CONV_AMX_H
#include "conv_kernels.h"

#define LBQ_AMX_POSITIONS 32 /* of the input that may be read beyond the last */

/* Whether this CPU has the matrix unit and the system lets this process use it, which is asked for here. */
int lbq_amx_available(void);
/* Some output rows of one image for one block of 32 outputs, from its padded input rows, `line` bytes each; both strides are
 * equal. Meanwhile weights that are read soon are fetched. */
void lbq_amx_rows(const struct lbq_conv *c, const uint8_t *levels, int64_t line, int64_t rows, int64_t block,
                  struct lbq_span soon, int32_t *out);
#endif
