/* comm_self.c: the group of one rank. Nothing crosses a wire, so a sum is what is already there. */
#include <stdlib.h>

#include "comm.h"

static void self_close(struct comm *c)
{
    free(c);
}

static void self_sum(struct comm *c, float *buf, size_t n)
{
    (void)c, (void)buf, (void)n;
}

static const struct comm_ops self_ops = {.close = self_close, .sum = self_sum};

int comm_self_open(struct comm **out, struct backend *be, struct err *e)
{
    struct comm *c;
    (void)be;
    TRY(mem_new(&c, sizeof *c, e));
    *c = (struct comm){.ops = &self_ops, .rank = 0, .size = 1};
    *out = c;
    return OK;
}
