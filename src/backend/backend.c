/* backend.c: the door to the devices, and the only place that names them. */
#include "backend.h"

#include <string.h>

#include "backend_priv.h"

#ifdef WITH_CUDA
static int devices_cuda(void) { return backend_count_cuda(); }
static int open_cuda(struct backend **out, int device, struct err *e) { return backend_open_cuda(out, device, e); }
static const char why_none[] = "no GPU is seen: is the NVIDIA driver there and new enough (580 or later)?";
#else
static int devices_cuda(void) { return 0; }
static int open_cuda(struct backend **out, int device, struct err *e)
{
    (void)out, (void)device;
    return err_set(e, ERR_UNSUPPORTED, "this build has no CUDA backend");
}
static const char why_none[] = "this build has no CUDA backend";
#endif

int backend_open(struct backend **out, const struct backend_opts *o, struct err *e)
{
    const char *device = o->device ? o->device : "cpu";
    if (!strcmp(device, "auto")) {
        if (o->cpu_level || devices_cuda() == 0) return backend_open_cpu(out, o, e);
        return open_cuda(out, 0, e);
    }
    if (!strcmp(device, "cpu")) return backend_open_cpu(out, o, e);
    if (strncmp(device, "cuda", 4))
        return err_set(e, ERR_INPUT, "device '%s' is unknown; known: cpu, cuda:N, auto", device);
    int n = devices_cuda(), index = 0;
    if (device[4]) {
        const char *digits = device + 5;
        size_t len = strspn(digits, "0123456789");
        if (device[4] != ':' || len == 0 || len > 4 || digits[len])
            return err_set(e, ERR_INPUT, "device '%s' is unknown; known: cpu, cuda:N, auto", device);
        for (size_t i = 0; i < len; i++) index = 10 * index + (digits[i] - '0');
    }
    if (n == 0) return err_set(e, ERR_DEVICE, "device %s: %s", device, why_none);
    if (index >= n) return err_set(e, ERR_INPUT, "device %s: this machine has %d: cuda:0 to cuda:%d", device, n, n - 1);
    return open_cuda(out, index, e);
}

void backend_close(struct backend **be)
{
    if (!*be) return;
    (*be)->ops->close(*be);
    *be = NULL;
}
