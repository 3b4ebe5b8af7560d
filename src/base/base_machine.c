/* base_machine.c: the clock, and what the machine has: memory, cores. All is read anew at each call from /proc and
 * the control groups, because the answer changes while a model loads; a source that is missing counts as no limit,
 * or as nothing free, never as an error. */
#include "base_priv.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double clock_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The number behind `key` in the first line that begins with it, times unit; `otherwise` where there is none ("max"
 * is how a control group spells no limit). */
static size_t read_number(const char *path, const char *key, size_t unit, size_t otherwise)
{
    char line[256];
    size_t n = strlen(key), value = otherwise;
    FILE *f = fopen(path, "r");
    if (!f) return otherwise;
    while (fgets(line, sizeof line, f)) {
        char *end;
        if (strncmp(line, key, n)) continue;
        unsigned long long v = strtoull(line + n, &end, 10);
        if (end != line + n) (void)size_mul((size_t)v, unit, &value);
        break;
    }
    fclose(f);
    return value;
}

struct group_files {
    const char *under, *limit, *used, *inactive, *active; /* the last two are keys of memory.stat */
};

static size_t group_bytes(const struct group_files *g, const char *mount, const char *group)
{
    char path[4352];
    snprintf(path, sizeof path, "%s%s%s/%s", mount, g->under, group, g->limit);
    size_t limit = read_number(path, "", 1, SIZE_MAX);
    if (limit == SIZE_MAX) return SIZE_MAX;
    snprintf(path, sizeof path, "%s%s%s/%s", mount, g->under, group, g->used);
    size_t used = read_number(path, "", 1, 0);
    snprintf(path, sizeof path, "%s%s%s/memory.stat", mount, g->under, group);
    size_t cache = read_number(path, g->inactive, 1, 0) + read_number(path, g->active, 1, 0);
    used -= cache < used ? cache : used;
    return used < limit ? limit - used : 0;
}

size_t machine_group_bytes(const char *membership, const char *mount)
{
    static const struct group_files v2 = {"", "memory.max", "memory.current", "inactive_file ", "active_file "};
    static const struct group_files v1 = {"/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                          "total_inactive_file ", "total_active_file "};
    char line[4096];
    size_t least = SIZE_MAX;
    FILE *f = fopen(membership, "r");
    if (!f) return SIZE_MAX;
    while (fgets(line, sizeof line, f)) { /* "4:memory:/path" in version 1, "0::/path" in version 2 */
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        bool unified = controllers[1] == 0;
        if (!unified && strcmp(controllers + 1, "memory")) continue;
        /* Up to the mount itself: a container sees its own group there, whatever path it is told. */
        for (char *slash = group + strlen(group); slash; slash = strrchr(group, '/')) {
            *slash = 0;
            size_t left = group_bytes(unified ? &v2 : &v1, mount, group);
            if (left < least) least = left;
        }
    }
    fclose(f);
    return least;
}

size_t machine_free_bytes(void)
{
    size_t available = read_number("/proc/meminfo", "MemAvailable:", 1024, 0);
    size_t group = machine_group_bytes("/proc/self/cgroup", "/sys/fs/cgroup");
    return group < available ? group : available;
}

size_t machine_total_bytes(void) { return read_number("/proc/meminfo", "MemTotal:", 1024, 0); }

size_t process_resident_bytes(void) { return read_number("/proc/self/status", "VmRSS:", 1024, 0); }

int machine_cores(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? n : 1;
}
