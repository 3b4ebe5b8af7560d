/* cpu_level.c: which arithmetic this machine has. Levels are ordered; a limit masks the better ones, so one machine can
 * test every level it has. */
#include <stdio.h>
#include <string.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "cpu_priv.h"

static bool have_always(void) { return true; }

#if defined(__x86_64__)
static bool have_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool have_avx512(void)
{
    return have_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
/* Where a bf16 dot does twice the work of a float multiply-add in the same time. On Intel's cores it takes four times as
 * long, and float is faster. */
static bool have_avx512bf16(void)
{
    return have_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
}
#elif defined(__aarch64__)
static bool have_neon(void)
{
    unsigned long caps = getauxval(AT_HWCAP);
    return (caps & HWCAP_ASIMDDP) && (caps & HWCAP_FPHP) && (caps & HWCAP_ASIMDHP);
}
static bool have_neonmm(void)
{
    unsigned long caps = getauxval(AT_HWCAP2);
    return have_neon() && (caps & HWCAP2_I8MM) && (caps & HWCAP2_BF16);
}
#endif

static const struct {
    const char *name;
    bool (*have)(void);
    void (*fill)(struct cpu_level *l);
} levels[] = {
    {"c", have_always, cpu_level_c},
#if defined(__x86_64__)
    {"avx2", have_avx2, cpu_level_avx2},
    {"avx512", have_avx512, cpu_level_avx512},
    {"avx512bf16", have_avx512bf16, cpu_level_avx512bf16},
#elif defined(__aarch64__)
    {"neon", have_neon, cpu_level_neon},
    {"neonmm", have_neonmm, cpu_level_neonmm},
#endif
};

int cpu_level_choose(struct cpu_level *l, const char *limit, struct err *e)
{
    char known[64] = "";
    int best = 0, limited = -1;
    for (int i = 0; i < (int)COUNT_OF(levels); i++) {
        if (!levels[i].have()) continue;
        best = i;
        if (limit && !strcmp(limit, levels[i].name)) limited = i;
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", levels[i].name);
    }
    if (limit && limited < 0)
        return err_set(e, ERR_INPUT, "cpu level %s is not available here: choose one of %s", limit, known);
    levels[limit ? limited : best].fill(l);
    return OK;
}
