/* rope: inverse frequencies, once at open, with every scaling rule applied, so that the engine knows one formula only
 * (angle = position * inv_freq[i]; cos and sin times mscale). Computed in double and rounded once; the references
 * compute in float, which is within a few units in the last place of this. */
#include <float.h>
#include <math.h>

#include "model_priv.h"

static const double PI = 3.14159265358979323846;

struct rope_spec rope_spec_new(void)
{
    return (struct rope_spec){.theta = 10000,
                              .factor = 1,
                              .low_freq = 1,
                              .high_freq = 4,
                              .beta_fast = 32,
                              .beta_slow = 1,
                              .scale = 1,
                              .truncate = true};
}

/* Long waves are stretched by factor, short ones kept, those between blended. */
static double llama3_freq(const struct rope_spec *s, double freq)
{
    double wave = 2 * PI / freq;
    if (wave < s->original / s->high_freq) return freq;
    if (wave > s->original / s->low_freq) return freq / s->factor;
    double t = (s->original / wave - s->low_freq) / (s->high_freq - s->low_freq);
    return (1 - t) * freq / s->factor + t * freq;
}

/* The dimension whose wave turns `rotations` times within the original context. */
static double yarn_dim(const struct rope_spec *s, int d_head, double rotations)
{
    return d_head * log(s->original / (rotations * 2 * PI)) / (2 * log(s->theta));
}

static double yarn_mscale(double factor, double by) { return factor <= 1 ? 1 : 0.1 * by * log(factor) + 1; }

static double yarn_attention(const struct rope_spec *s)
{
    if (s->attention > 0) return s->attention;
    if (s->mscale != 0 && s->mscale_all != 0)
        return yarn_mscale(s->factor, s->mscale) / yarn_mscale(s->factor, s->mscale_all);
    return yarn_mscale(s->factor, 1);
}

static int check(struct err *e, const char *what, double v, double above, double to)
{
    if (v > above && v <= to) return OK; /* false for NaN too */
    return err_set(e, ERR_INPUT, "rope %s %g, expected a number above %g and up to %g", what, v, above, to);
}

static int spec_check(const struct rope_spec *s, struct err *e)
{
    TRY(check(e, "theta", s->theta, 1, 1e15));
    TRY(check(e, "scale", s->scale, 0, 1e6));
    if (s->kind == ROPE_DEFAULT) return OK;
    TRY(check(e, "factor", s->factor, 0, 1e6));
    if (s->kind == ROPE_LINEAR) return OK;
    TRY(check(e, "original context", s->original, 0, 2147483647));
    if (s->kind == ROPE_LLAMA3) {
        TRY(check(e, "low_freq_factor", s->low_freq, 0, 1e6));
        return check(e, "high_freq_factor", s->high_freq, s->low_freq, 1e6);
    }
    TRY(check(e, "beta_slow", s->beta_slow, 0, 1e6));
    TRY(check(e, "beta_fast", s->beta_fast, 0, 1e6));
    return check(e, "attention factor", yarn_attention(s), 0, 1e6);
}

int rope_fill(struct model_config *c, const struct rope_spec *s, const float *divisors, struct err *e)
{
    TRY(spec_check(s, e));
    int d = c->d_head;
    double low = 0, high = 0;
    if (s->kind == ROPE_YARN) {
        low = yarn_dim(s, d, s->beta_fast);
        high = yarn_dim(s, d, s->beta_slow);
        if (s->truncate) {
            low = floor(low);
            high = ceil(high);
        }
        low = fmax(low, 0);
        high = fmin(high, d - 1);
        if (low == high) high += 0.001;
    }
    for (int i = 0; i < d / 2; i++) {
        double freq = pow(s->theta, -2.0 * i / d);
        if (s->kind == ROPE_LINEAR) {
            freq /= s->factor;
        } else if (s->kind == ROPE_LLAMA3) {
            freq = llama3_freq(s, freq);
        } else if (s->kind == ROPE_YARN) {
            double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
            freq = freq / s->factor * ramp + freq * (1 - ramp);
        }
        if (divisors) {
            if (!(divisors[i] > 0 && divisors[i] <= FLT_MAX))
                return err_set(e, ERR_INPUT, "tensor rope_freqs.weight: element %d is %g, expected a positive number",
                               i, (double)divisors[i]);
            freq /= (double)divisors[i];
        }
        c->rope_inv_freq[i] = (float)freq;
    }
    c->rope_mscale = (float)((s->kind == ROPE_YARN ? yarn_attention(s) : 1) * s->scale);
    return OK;
}
