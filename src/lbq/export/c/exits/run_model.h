
/* The same, but the input stops at the first timestep at which its largest logit leads the second by the margin in the
   network's file. An input that goes on starts anew, over one timestep more. Writes the logits of the timestep at which it
   stopped, and that timestep, 1 to MODEL_TIMESTEPS. After t timesteps a logit is worth MODEL_LOGIT_SCALE * MODEL_TIMESTEPS / t.
   Returns 0, or 1 where a pointer is NULL. */
int model_run_early(const uint8_t *input, int64_t *logits, model_memory *memory, int *timesteps);
