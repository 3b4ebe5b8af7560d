/* cpu_level_neon.c: the NEON level: the shared sources over its registers. */
#include "cpu_v16_neon.h"

#define LEVEL(name) name##_neon
#include "cpu_linear_impl.h"
#include "cpu_vec_impl.h"

void cpu_level_neon(struct cpu_level *l)
{
    l->name = "neon";
    linear_fill(l);
    vec_fill(l);
}
