/* synthetic.c: models of real shapes with random weights and no file, for measuring. All matrices of one type are views
 * into one small buffer of random blocks: row r begins r blocks into it, so rows differ and a matrix of any size takes
 * next to no memory until a backend packs it. The scales are such that activations stay of the size they have in
 * trained models; what such a model writes means nothing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

struct preset {
    const char *name;
    enum family family;
    int32_t layers, d, heads, kv_heads, d_head, ff, vocab, ctx, experts, used, window;
    bool tied;
    float eps;
    double theta;
    enum rope_kind rope;
};

/* From the models' config.json. */
static const struct preset presets[] = {
    {"gpt-oss-120b", FAMILY_GPT_OSS, 36, 2880, 64, 8, 64, 2880, 201088, 131072, 128, 4, 128, false, 1e-5f, 150000,
     ROPE_YARN},
    {"gpt-oss-20b", FAMILY_GPT_OSS, 24, 2880, 64, 8, 64, 2880, 201088, 131072, 32, 4, 128, false, 1e-5f, 150000,
     ROPE_YARN},
    {"llama-3.1-8b", FAMILY_LLAMA, 32, 4096, 32, 8, 128, 14336, 128256, 131072, 0, 0, 0, false, 1e-5f, 500000,
     ROPE_LLAMA3},
    {"llama-3.2-1b", FAMILY_LLAMA, 16, 2048, 32, 8, 64, 8192, 128256, 131072, 0, 0, 0, true, 1e-5f, 500000,
     ROPE_LLAMA3},
    {"tinyllama-1.1b", FAMILY_LLAMA, 22, 2048, 32, 4, 64, 5632, 32000, 2048, 0, 0, 0, false, 1e-5f, 10000,
     ROPE_DEFAULT},
    {"mistral-small-3.1-24b", FAMILY_MISTRAL, 40, 5120, 32, 8, 128, 32768, 131072, 131072, 0, 0, 0, false, 1e-5f, 1e9,
     ROPE_DEFAULT},
    {"qwen3-coder-30b-a3b", FAMILY_QWEN3_MOE, 48, 2048, 32, 4, 128, 768, 151936, 262144, 128, 8, 0, false, 1e-6f, 1e7,
     ROPE_DEFAULT},
};

/* Starts of matrices differ by up to OFFSETS blocks. */
enum { OFFSETS = 1 << 12, MAX_SPEC = 128 };
static const float WEIGHT_STD = 0.02f;

struct pool {
    uint8_t *blocks, *bscale; /* of one type */
    float *scale;
};
struct synthetic {
    enum dtype format;
    struct pool pool[DT_COUNT];
    float *ones, *small; /* vectors: norms; biases and sinks */
    uint64_t seed;
};

/* ------------------------------------------------------------------------------------------------ random blocks */

static uint64_t next(uint64_t *s) /* splitmix64 */
{
    uint64_t z = (*s += 0x9E3779B97F4A7C15u);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* Uniform with mean 0 and variance 1. */
static float unit(uint64_t *s) { return ((float)(next(s) >> 40) / (float)(1 << 23) - 1) * 1.7320508f; }

static void put16(uint8_t *p, uint16_t v) { memcpy(p, &v, sizeof v); }

/* The scale of blocks whose codes have the standard deviation `codes`, varied by up to a quarter. */
static uint16_t half_scale(uint64_t *s, float codes)
{
    return f32_to_f16(WEIGHT_STD / codes * (1 + 0.14f * unit(s)));
}

static void fill_block(enum dtype type, uint8_t *b, size_t n, uint64_t *s)
{
    float w = WEIGHT_STD * unit(s);
    for (size_t i = 0; i < n; i++) b[i] = (uint8_t)(next(s) >> 32);
    switch (type) {
    case DT_F32: memcpy(b, &w, sizeof w); break;
    case DT_F16: put16(b, f32_to_f16(w)); break;
    case DT_BF16: put16(b, f32_to_bf16(w)); break;
    case DT_F8_E4M3: b[0] = f32_to_e4m3(32 * unit(s)); break;
    case DT_Q4_0: put16(b, half_scale(s, 4.6f)); break;
    case DT_Q5_0: put16(b, half_scale(s, 9.2f)); break;
    case DT_Q8_0: put16(b, half_scale(s, 74)); break;
    case DT_Q4_1: /* min = -7.5 steps */
        put16(b, half_scale(s, 4.6f));
        put16(b + 2, f32_to_f16(-7.5f * WEIGHT_STD / 4.6f));
        break;
    case DT_Q5_1:
        put16(b, half_scale(s, 9.2f));
        put16(b + 2, f32_to_f16(-15.5f * WEIGHT_STD / 9.2f));
        break;
    case DT_Q4_K: /* 6-bit scales and minima of mean 31.5: centred by dmin */
        put16(b, half_scale(s, 4.6f * 36));
        put16(b + 2, f32_to_f16(7.5f * WEIGHT_STD / (4.6f * 36)));
        break;
    case DT_Q5_K:
        put16(b, half_scale(s, 9.2f * 36));
        put16(b + 2, f32_to_f16(15.5f * WEIGHT_STD / (9.2f * 36)));
        break;
    case DT_Q6_K: put16(b + 208, half_scale(s, 18.5f * 74)); break;
    case DT_MXFP4_GGUF: b[0] = (uint8_t)(119 + (next(s) & 1)); break;
    default: break; /* MXFP4, NVFP4: codes only, scales apart */
    }
}

/* The block buffer of a type, long enough for every matrix of the model. */
static int pool_open(struct model *m, struct pool *p, enum dtype type, uint64_t *s, struct err *e)
{
    const struct model_config *c = &m->config;
    const struct dtype_info *t = &dtype_infos[type];
    const size_t dims[] = {(size_t)c->n_vocab, (size_t)c->d_ff, (size_t)c->n_heads * (size_t)c->d_head,
                           (size_t)c->d_model, (size_t)c->n_experts};
    size_t longest = 0, n, bytes = (size_t)t->block_bytes;
    if (p->blocks) return OK;
    for (size_t i = 0; i < COUNT_OF(dims); i++) longest = dims[i] > longest ? dims[i] : longest;
    n = 2 * longest + OFFSETS + 64;
    p->blocks = arena_alloc(&m->arena, n * bytes);
    p->scale = arena_alloc(&m->arena, sizeof *p->scale);
    if (t->bscale_block) p->bscale = arena_alloc(&m->arena, n);
    if (!p->blocks || !p->scale || (t->bscale_block && !p->bscale))
        return err_set(e, ERR_NOMEM, "out of memory for %zu random blocks of %s", n, t->name);
    for (size_t i = 0; i < n; i++) {
        fill_block(type, p->blocks + i * bytes, bytes, s);
        if (type == DT_MXFP4) p->bscale[i] = (uint8_t)(119 + (next(s) & 1));
        if (type == DT_NVFP4) p->bscale[i] = (uint8_t)(0x34 + (next(s) & 7)); /* 0.75 to 1.375 */
    }
    p->scale[0] = type == DT_NVFP4 ? WEIGHT_STD / 2.9f : WEIGHT_STD / 32;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ roles */

/* As such checkpoints are published: these formats leave the embedding, the head and the router as they are, and
 * MXFP4 is for experts where there are any. */
static enum dtype type_of(const struct model *m, enum dtype format, enum role role)
{
    bool apart = format == DT_F8_E4M3 || format == DT_NVFP4 || format == DT_MXFP4;
    if (role == ROLE_ROUTER) return apart ? DT_BF16 : DT_F32;
    if (apart && role_is_shared(role)) return DT_BF16;
    if (format == DT_MXFP4 && m->config.n_experts && !role_per_expert(m, role)) return DT_BF16;
    return format;
}

static int bind_matrix(struct model *m, struct synthetic *y, enum role role, struct dmat *out, struct err *e)
{
    enum dtype type = type_of(m, y->format, role);
    const struct dtype_info *t = &dtype_infos[type];
    struct pool *p = &y->pool[type];
    int64_t rows, cols;
    role_shape(&m->config, role, &rows, &cols);
    if (cols % t->block)
        return err_set(e, ERR_INPUT, "the %s has %lld columns, which %s cannot hold in its blocks of %d", role_names[role],
                       (long long)cols, t->name, t->block);
    TRY(pool_open(m, p, type, &y->seed, e));
    size_t at = (size_t)(next(&y->seed) % OFFSETS), stride = (size_t)t->block_bytes;
    *out = (struct dmat){.type = type, .rows = rows, .cols = cols, .data = p->blocks + at * stride, .row_stride = stride};
    if (t->bscale_block) {
        out->bscale = p->bscale + at;
        out->bscale_stride = 1;
    }
    if (type == DT_F8_E4M3 || type == DT_NVFP4) {
        out->scale = p->scale;
        out->scale_rows = rows;
        out->scale_cols = cols;
        out->scale_stride = 1;
    }
    m->bytes += dmat_bytes(out);
    return OK;
}

static void bind_vector(struct model *m, struct synthetic *y, enum role role, struct dmat *out)
{
    int64_t n, one;
    bool norm = role == ROLE_OUT_NORM || role == ROLE_ATTN_NORM || role == ROLE_FFN_NORM || role == ROLE_Q_NORM ||
                role == ROLE_K_NORM;
    role_shape(&m->config, role, &n, &one);
    *out = (struct dmat){.type = DT_F32, .rows = n, .cols = 1, .row_stride = sizeof(float)};
    out->data = (const uint8_t *)(norm ? y->ones : y->small);
    m->bytes += dmat_bytes(out);
}

static int bind(struct model *m, enum role role, int layer, enum need need, void *with, struct err *e)
{
    struct synthetic *y = with;
    int64_t rows, cols;
    int n = role_per_expert(m, role) ? m->config.n_experts : 1;
    if (role == ROLE_HEAD && m->config.tied) return OK;
    if (need == NEED_MAY && role != ROLE_HEAD) return OK;
    role_shape(&m->config, role, &rows, &cols);
    for (int x = 0; x < n; x++) {
        if (cols == 1) bind_vector(m, y, role, role_slot(m, role, layer, x));
        else TRY(bind_matrix(m, y, role, role_slot(m, role, layer, x), e));
    }
    return OK;
}

/* ------------------------------------------------------------------------------------------------ configuration */

static int configure(struct model *m, const struct preset *p, int layers, struct err *e)
{
    struct model_config *c = &m->config;
    struct rope_spec rope = rope_spec_new();
    int32_t *window;
    bool oss = p->family == FAMILY_GPT_OSS;
    *c = (struct model_config){
        .family = p->family, .n_layers = layers, .d_model = p->d, .n_heads = p->heads, .n_kv_heads = p->kv_heads,
        .d_head = p->d_head, .d_ff = p->ff, .n_vocab = p->vocab, .n_experts = p->experts, .n_experts_used = p->used,
        .ctx_train = p->ctx, .rms_eps = p->eps, .activation = oss ? ACT_SWIGLU_OAI : ACT_SILU,
        .swiglu_limit = oss ? 7 : 0, .router = oss ? ROUTER_TOPK_SOFTMAX : ROUTER_SOFTMAX_TOPK_NORM, .tied = p->tied,
        .bos = -1, .sampling = {-1, -1, -1, -1, -1}};
    m->qkv_bias = m->o_bias = oss ? NEED_MUST : NEED_NEVER;
    rope.kind = p->rope;
    rope.theta = p->theta;
    if (p->rope == ROPE_LLAMA3) rope.factor = p->tied ? 32 : 8, rope.original = 8192;
    if (p->rope == ROPE_YARN) rope.factor = 32, rope.original = 4096, rope.truncate = false;
    TRY(rope_fill(c, &rope, NULL, e));
    TRY(config_windows(c, 0, &window, &m->arena, e));
    for (int i = 0; i < layers; i += 2) window[i] = p->window; /* gpt-oss: every other layer, from the first */
    return config_check(c, e);
}

static int unknown(struct err *e, const char *what, const char *given, const char *known)
{
    return err_set(e, ERR_INPUT, "no %s of a synthetic model is called '%s': known are %s", what, given, known);
}

static int find_preset(const struct preset **out, const char *name, struct err *e)
{
    char known[256] = "";
    for (size_t i = 0; i < COUNT_OF(presets); i++) {
        *out = &presets[i];
        if (!strcmp(name, presets[i].name)) return OK;
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", i ? ", " : "", presets[i].name);
    }
    return unknown(e, "shape", name, known);
}

static int find_format(enum dtype *out, const char *name, struct err *e)
{
    char known[256] = "";
    for (enum dtype t = DT_F32; t < DT_MXFP4_GGUF; t++) { /* which is another spelling of MXFP4 */
        *out = t;
        if (!strcmp(name, dtype_infos[t].name)) return OK;
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", t > DT_F32 ? ", " : "", dtype_infos[t].name);
    }
    return unknown(e, "format", name, known);
}

static int find_layers(int *out, const char *text, const struct preset *p, struct err *e)
{
    static const char key[] = "layers=";
    char *end = NULL;
    *out = p->layers;
    if (!text) return OK;
    if (strncmp(text, key, strlen(key))) return unknown(e, "option", text, "layers=N");
    long n = strtol(text + strlen(key), &end, 10);
    if (*end || end == text + strlen(key) || n < 1 || n > MAX_LAYERS)
        return err_set(e, ERR_INPUT, "'%s' of a synthetic model: layers are a number from 1 to %d", text, MAX_LAYERS);
    *out = (int)n;
    return OK;
}

static int build(struct model *m, char *spec, struct err *e)
{
    const struct preset *p;
    struct synthetic y = {.seed = 1};
    int layers;
    char *format = strchr(spec, ':'), *option = NULL;
    if (format) *format++ = 0;
    if (format && (option = strchr(format, ':'))) *option++ = 0;
    TRY(find_preset(&p, spec, e));
    if (!format || !*format) return err_set(e, ERR_INPUT, "a synthetic model is SHAPE:FORMAT, for example %s:q8_0", p->name);
    TRY(find_format(&y.format, format, e));
    TRY(find_layers(&layers, option, p, e));
    TRY(configure(m, p, layers, e));
    size_t longest = (size_t)(p->ff > p->heads * p->d_head ? p->ff : p->heads * p->d_head);
    y.ones = arena_alloc(&m->arena, longest * sizeof *y.ones);
    y.small = arena_alloc(&m->arena, longest * sizeof *y.small);
    if (!y.ones || !y.small) return err_set(e, ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < longest; i++) {
        y.ones[i] = 1 + 0.1f * unit(&y.seed);
        y.small[i] = 0.02f * unit(&y.seed);
    }
    m->quantization = dtype_infos[y.format].name;
    return model_bind(m, bind, &y, e);
}

int model_synthetic(struct model **out, const char *spec, struct err *e)
{
    struct model *m;
    char text[MAX_SPEC];
    if (strlen(spec) >= sizeof text)
        return err_set(e, ERR_INPUT, "'%.40s...' is no synthetic model: SHAPE:FORMAT[:layers=N]", spec);
    snprintf(text, sizeof text, "%s", spec);
    TRY(mem_new(&m, sizeof *m, e));
    m->container = "synthetic";
    m->arch = "";
    m->vocab = (struct model_vocab){.bos = -1, .eos = -1, .unk = -1, .add_bos = -1, .add_space_prefix = -1};
    m->path = m->name = arena_str(&m->arena, span_of(spec));
    int rc = m->name ? build(m, text, e) : err_set(e, ERR_NOMEM, "out of memory");
    if (rc < 0) {
        model_close(&m);
        return rc;
    }
    *out = m;
    return OK;
}
