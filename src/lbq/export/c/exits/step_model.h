
/* After a timestep: 1 if the input may stop there, because its largest logit leads the second by the margin in the network's
   file, or because it has had MODEL_TIMESTEPS; else 0. Writes the logits with the bias of the timesteps so far. After
   t timesteps a logit is worth MODEL_LOGIT_SCALE * MODEL_TIMESTEPS / t. The state is not changed. 0, with nothing written,
   before the first timestep or where a pointer is NULL. */
int model_stop(const model_state *state, int64_t *logits);
