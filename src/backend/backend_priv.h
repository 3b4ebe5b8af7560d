/* backend_priv: the devices behind backend.c. */
#ifndef HEARTH_BACKEND_PRIV_H
#define HEARTH_BACKEND_PRIV_H

#include "backend.h"

int backend_open_cpu(struct backend **out, const struct backend_opts *o, struct err *e) MUST_CHECK;
/* GPUs that this build can use; 0 without a driver. */
int backend_count_cuda(void);
int backend_open_cuda(struct backend **out, int device, struct err *e) MUST_CHECK;

/* Counts an attention over T rows: of each its sequence and its position, rows of a sequence side by side. */
static inline void backend_count_attention(struct backend_stats *s, int unit, int T, const int32_t *row_seq,
                                           const int32_t *row_pos, int window, int H, int Hk, int Dh)
{
    for (int t = 0; t < T; t++) {
        uint64_t keys = (uint64_t)row_pos[t] + 1;
        if (window > 0 && keys > (uint64_t)window) keys = (uint64_t)window;
        s->ops[unit] += 4 * keys * (uint64_t)Dh * (uint64_t)H;
        bool last = t + 1 == T || row_seq[t + 1] != row_seq[t];
        if (last) s->kv_bytes += 2 * sizeof(uint16_t) * keys * (uint64_t)Dh * (uint64_t)Hk;
    }
}

#endif
