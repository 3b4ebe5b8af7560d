/* cpu_level_avx512bf16.c: AVX-512 with bf16 dot products, for BF16 and F8 weights. Activations are rounded to bf16 there,
 * and numbers below 2^-126 count as zero. */
#define BF16_DOT 1
#include "cpu_v16_avx512.h"

#define LEVEL(name) name##_avx512bf16
#include "cpu_linear_impl.h"
#include "cpu_vec_impl.h"

void cpu_level_avx512bf16(struct cpu_level *l)
{
    l->name = "avx512bf16";
    linear_fill(l);
    vec_fill(l);
}
