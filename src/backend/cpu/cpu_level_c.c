/* cpu_level_c.c: the plain C level: every weight decoded exactly, float arithmetic, no intrinsics. Slow, and the
 * truth that the other levels are tested against. */
#include <math.h>
#include <string.h>

#include "cpu_priv.h"

typedef struct {
    float f[16];
} v16;

#define EACH(expr)                                                                                                   \
    for (int i = 0; i < 16; i++) r.f[i] = (expr);                                                                    \
    return r

static inline v16 v16_set(float x)
{
    v16 r;
    EACH(x);
}
static inline v16 v16_zero(void) { return v16_set(0); }
static inline v16 v16_load(const float *p)
{
    v16 r;
    EACH(p[i]);
}
static inline void v16_store(float *p, v16 x) { memcpy(p, x.f, sizeof x.f); }
static inline v16 v16_mul(v16 x, v16 y)
{
    v16 r;
    EACH(x.f[i] * y.f[i]);
}
static inline v16 v16_add(v16 x, v16 y)
{
    v16 r;
    EACH(x.f[i] + y.f[i]);
}
static inline v16 v16_div(v16 x, v16 y)
{
    v16 r;
    EACH(x.f[i] / y.f[i]);
}
static inline v16 v16_fma(v16 x, v16 y, v16 z)
{
    v16 r;
    EACH(x.f[i] * y.f[i] + z.f[i]);
}
/* NaN in x stays NaN. */
static inline v16 v16_min(v16 y, v16 x)
{
    v16 r;
    EACH(y.f[i] < x.f[i] ? y.f[i] : x.f[i]);
}
static inline v16 v16_max(v16 y, v16 x)
{
    v16 r;
    EACH(y.f[i] > x.f[i] ? y.f[i] : x.f[i]);
}
static inline v16 v16_larger(v16 x, v16 y)
{
    v16 r;
    EACH(x.f[i] > y.f[i] ? x.f[i] : y.f[i]);
}
static inline float v16_sum(v16 x)
{
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x.f[i] += x.f[i + step];
    return x.f[0];
}
static inline float v16_top(v16 x)
{
    for (int i = 1; i < 16; i++) x.f[0] = x.f[i] > x.f[0] ? x.f[i] : x.f[0];
    return x.f[0];
}
static inline v16 v16_round(v16 x)
{
    v16 r;
    EACH(rintf(x.f[i]));
}
static inline v16 v16_pow2(v16 x)
{
    v16 r;
    EACH(ldexpf(1, (int)x.f[i]));
}
static inline v16 v16_f16(const uint8_t *p)
{
    uint16_t h[16];
    v16 r;
    memcpy(h, p, sizeof h);
    EACH(f16_to_f32(h[i]));
}
static inline void v16_to_f16(uint16_t *p, v16 x)
{
    for (int i = 0; i < 16; i++) p[i] = f32_to_f16(x.f[i]);
}

enum { PEAK_CHAINS = 2, ATTEND_ROWS = 2 };
#include "cpu_vec_impl.h"

enum { ROW_BLOCK = 16 };

/* Four floats as the compiler's own vector, on any machine: left alone it would vectorise over k, and shuffle. */
typedef float quad __attribute__((vector_size(16)));

/* sum[16] += w[32][16] times x[32], the tile summed apart first. */
static void add_tile(float *sum, const float (*w)[PANEL], const float *x)
{
    quad part[PANEL / 4] = {{0}}, col[PANEL / 4];
    for (int k = 0; k < TILE; k++) {
        memcpy(col, w[k], sizeof col);
        for (int i = 0; i < PANEL / 4; i++) part[i] += col[i] * x[k];
    }
    memcpy(col, sum, sizeof col);
    for (int i = 0; i < PANEL / 4; i++) col[i] += part[i];
    memcpy(sum, col, sizeof col);
}

static void product(const struct cpu_part *p, int64_t p0, int64_t p1, const struct cpu_acts *a, int first, int last,
                    const struct cpu_out *out)
{
    for (int64_t panel = p0; panel < p1; panel++) {
        int64_t left = p->rows - panel * PANEL;
        for (int m0 = first; m0 < last; m0 += ROW_BLOCK) {
            int n = last - m0 < ROW_BLOCK ? last - m0 : ROW_BLOCK;
            float sum[ROW_BLOCK][PANEL] = {{0}};
            for (int64_t t = 0; t < p->tiles; t++) {
                float w[TILE][PANEL];
                cpu_tile(p, panel, t, w);
                for (int m = 0; m < n; m++) add_tile(sum[m], w, a->x + acts_at(a, t, m0 + m) * TILE);
            }
            for (int m = 0; m < n; m++)
                cpu_store(out, (size_t)(m0 + m), (size_t)panel * PANEL, sum[m], left < PANEL ? (size_t)left : PANEL);
        }
    }
}

static int wants(enum dtype type)
{
    (void)type;
    return WANT_FLOAT;
}

static uint64_t read_bytes(const uint8_t *p, size_t bytes)
{
    uint64_t sum[8] = {0}, w[8];
    for (size_t at = 0; at < bytes; at += sizeof w) {
        memcpy(w, p + at, sizeof w);
        for (int i = 0; i < 8; i++) sum[i] |= w[i];
    }
    for (int i = 1; i < 8; i++) sum[0] |= sum[i];
    return sum[0];
}

void cpu_level_c(struct cpu_level *l)
{
    l->name = "c";
    vec_fill(l);
    l->wants = wants;
    l->product = product;
    l->read = read_bytes;
}
