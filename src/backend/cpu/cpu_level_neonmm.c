/* cpu_level_neonmm.c: NEON with the matrix products of Armv8.6: int8 (i8mm), and bf16 dots for BF16 and F8 weights, where
 * activations are rounded to bf16. */
#define ARM_MATMUL 1
#include "cpu_v16_neon.h"

#define LEVEL(name) name##_neonmm
#include "cpu_linear_impl.h"
#include "cpu_vec_impl.h"

void cpu_level_neonmm(struct cpu_level *l)
{
    l->name = "neonmm";
    linear_fill(l);
    vec_fill(l);
}
