/* backend_priv: the devices behind backend.c. */
#ifndef HEARTH_BACKEND_PRIV_H
#define HEARTH_BACKEND_PRIV_H

#include "backend.h"

int backend_open_cpu(struct backend **out, const struct backend_opts *o, struct err *e) MUST_CHECK;
/* GPUs that this build can use; 0 without a driver. */
int backend_count_cuda(void);
int backend_open_cuda(struct backend **out, int device, struct err *e) MUST_CHECK;

#endif
