/* comm.c: the door to the kinds of groups, and the only place that names them. */
#include "comm.h"

void comm_close(struct comm **c)
{
    if (!*c) return;
    (*c)->ops->close(*c);
    *c = NULL;
}
