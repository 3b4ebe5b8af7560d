/* comm: one group of ranks. Buffer calls are queued in the backend's stream order. A group of one (comm_self) has
 * nothing to exchange: its sum is the identity. */
#ifndef HEARTH_COMM_H
#define HEARTH_COMM_H

#include "backend.h"

struct comm;

struct comm_ops {
    void (*close)(struct comm *c);
    /* buf[n] (dev) = sum over the group's ranks of buf[n], in rank order */
    void (*sum)(struct comm *c, float *buf, size_t n);
};

struct comm {
    const struct comm_ops *ops;
    int rank, size;
};

int comm_self_open(struct comm **out, struct backend *be, struct err *e) MUST_CHECK;
void comm_close(struct comm **c);

#endif
