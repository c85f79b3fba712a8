/* The template of neuron.c: see there. */
#include <string.h>

#include "isa.h"
#include "neuron_sets.h"

void NAME(lbq_neuron_site)(const struct lbq_neuron *n, int64_t image, int64_t site, int32_t *scratch,
                           int64_t counts[2]) {
    int64_t channels = n->channels;
    int32_t *restrict u = scratch, *restrict v = u + channels, *restrict pending = v + channels;
    int32_t *restrict level = pending + channels;
    const int32_t *bias = n->bias + (n->bias_map ? site * channels : 0), *reset = n->reset;
    for (int64_t t = 0; t < n->timesteps; t++) {
        int64_t at = ((t * n->batch + image) * n->sites + site) * channels;
        int64_t from = ((n->is_static ? image : t * n->batch + image) * n->sites + site) * channels;
        for (int64_t c = 0; c < channels; c++) u[c] = bias[c];
        if (n->currents) {
            const int32_t *current = n->currents + from;
            for (int64_t c = 0; c < channels; c++) u[c] += (int32_t)((uint32_t)current[c] << n->fraction);
        }
        for (int64_t i = 0; i < n->identities; i++) {
            const int32_t *weight = n->identity_weights[i];
            const uint8_t *levels = n->identity_levels[i] + at;
            if (n->identity_signed[i])
                for (int64_t c = 0; c < channels; c++) u[c] += weight[c] * (int8_t)levels[c];
            else
                for (int64_t c = 0; c < channels; c++) u[c] += weight[c] * levels[c];
        }
        if (t > 0) {
            if (n->leak_k == 0)
                for (int64_t c = 0; c < channels; c++) u[c] += v[c];
            else
                for (int64_t c = 0; c < channels; c++)
                    u[c] += (int32_t)(((int64_t)v[c] * n->leak_m + ((int64_t)1 << (n->leak_k - 1))) >> n->leak_k);
            if (!n->decay_reset && n->reset_kind != RESET_TO_HARD)
                for (int64_t c = 0; c < channels; c++) u[c] -= pending[c];
        }
        memset(level, 0, (size_t)channels * sizeof *level);
        for (int64_t k = 0; k < n->n_max; k++) {
            const int32_t *threshold = n->thresholds + k * channels;
            if (n->is_signed)
                for (int64_t c = 0; c < channels; c++) level[c] += (u[c] < 0 ? -u[c] : u[c]) >= threshold[c];
            else
                for (int64_t c = 0; c < channels; c++) level[c] += u[c] >= threshold[c];
        }
        uint32_t active = 0, bits = 0;
        for (int64_t c = 0; c < channels; c++) {
            uint32_t s = (uint32_t)level[c];
            active += s != 0;
            s = s - ((s >> 1) & 0x55); /* set bits of 8, in pairs, then fours */
            s = (s & 0x33) + ((s >> 2) & 0x33);
            bits += (s & 0x0f) + (s >> 4);
        }
        counts[0] += active, counts[1] += bits;
        if (n->is_signed)
            for (int64_t c = 0; c < channels; c++) level[c] = u[c] < 0 ? -level[c] : level[c];
        for (int64_t c = 0; c < channels; c++) n->levels[at + c] = (uint8_t)level[c];
        if (n->reset_kind == RESET_TO_HARD) {
            for (int64_t c = 0; c < channels; c++) v[c] = level[c] ? 0 : u[c];
            continue;
        }
        for (int64_t c = 0; c < channels; c++) {
            int32_t times = n->reset_kind == RESET_TO_LEVEL ? level[c] : (level[c] > 0) - (level[c] < 0);
            pending[c] = reset[c] * times;
        }
        for (int64_t c = 0; c < channels; c++) v[c] = n->decay_reset ? u[c] - pending[c] : u[c];
    }
}
LBQ_END
