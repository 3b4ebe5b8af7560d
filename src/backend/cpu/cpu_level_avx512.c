/* cpu_level_avx512.c: the AVX512 level: the shared sources over its registers. */
#include "cpu_v16_avx512.h"

#define LEVEL(name) name##_avx512
#include "cpu_linear_impl.h"
#include "cpu_vec_impl.h"

void cpu_level_avx512(struct cpu_level *l)
{
    l->name = "avx512";
    linear_fill(l);
    vec_fill(l);
}
