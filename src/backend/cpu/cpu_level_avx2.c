/* cpu_level_avx2.c: the AVX2 level: the shared sources over its registers. */
#include "cpu_v16_avx2.h"

#define LEVEL(name) name##_avx2
#include "cpu_linear_impl.h"
#include "cpu_vec_impl.h"

void cpu_level_avx2(struct cpu_level *l)
{
    l->name = "avx2";
    linear_fill(l);
    vec_fill(l);
}
