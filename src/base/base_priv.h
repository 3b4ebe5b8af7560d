/* base_priv: what the room shares with its own tests. */
#ifndef HEARTH_BASE_PRIV_H
#define HEARTH_BASE_PRIV_H

#include "base.h"

/* The least that any control group of this process, or a group above it, leaves to it: limit minus use, where the
 * pages of files do not count as used. SIZE_MAX where there is no limit. membership is "/proc/self/cgroup" and mount
 * "/sys/fs/cgroup", but for tests; version 2, version 1 and both at once are understood. */
size_t machine_group_bytes(const char *membership, const char *mount);

#endif
