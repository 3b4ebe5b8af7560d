/* backend.c: the door to the devices, and the only place that names them. */
#include "backend.h"

#include "backend_priv.h"

int backend_open(struct backend **out, const struct backend_opts *o, struct err *e) { return backend_open_cpu(out, o, e); }

void backend_close(struct backend **be)
{
    if (!*be) return;
    (*be)->ops->close(*be);
    *be = NULL;
}
