/* hf: a checkpoint directory as Hugging Face lays it out: config.json, the safetensors files that the index names
 * (and no other: repositories hold duplicates), roles bound to transformers' names. How a matrix is quantised is told
 * by its tensors: a type and the siblings beside it. Scales are converted to float here, weights are never read.
 *
 * Tensors that nobody asks for are ignored (KV-cache scales, vision towers), unless they stand among the layers and
 * would be part of the maths. */
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

enum { MAX_INDEX = 256 << 20, MAX_CONFIG = 16 << 20, MAX_FILES = 1024 };

/* What was met among the weights, for the name that people read. */
enum seen { SEEN_TENSOR = 1, SEEN_CHANNEL = 2, SEEN_BLOCK = 4, SEEN_NVFP4 = 8, SEEN_MXFP4 = 16 };

struct binding {
    const struct hf_config *config;
    const char *prefix; /* "model.", or where a multimodal checkpoint keeps the text tower */
    unsigned seen;
};

/* Matrices without their last part (".weight" and its siblings), vectors in full. */
static const char *const names[ROLE_COUNT] = {
    [ROLE_EMBED] = "embed_tokens",
    [ROLE_OUT_NORM] = "norm.weight",
    [ROLE_HEAD] = "lm_head",
    [ROLE_ATTN_NORM] = "input_layernorm.weight",
    [ROLE_Q] = "self_attn.q_proj",
    [ROLE_K] = "self_attn.k_proj",
    [ROLE_V] = "self_attn.v_proj",
    [ROLE_O] = "self_attn.o_proj",
    [ROLE_Q_BIAS] = "self_attn.q_proj.bias",
    [ROLE_K_BIAS] = "self_attn.k_proj.bias",
    [ROLE_V_BIAS] = "self_attn.v_proj.bias",
    [ROLE_O_BIAS] = "self_attn.o_proj.bias",
    [ROLE_Q_NORM] = "self_attn.q_norm.weight",
    [ROLE_K_NORM] = "self_attn.k_norm.weight",
    [ROLE_SINKS] = "self_attn.sinks",
    [ROLE_FFN_NORM] = "post_attention_layernorm.weight",
    [ROLE_GATE] = "gate_proj",
    [ROLE_UP] = "up_proj",
    [ROLE_DOWN] = "down_proj",
    [ROLE_ROUTER] = "mlp.gate",
    [ROLE_ROUTER_BIAS] = "mlp.router.bias",
};

/* ------------------------------------------------------------------------------------------------ one matrix */

static struct tensor *sibling(const struct model *m, const char *base, const char *part)
{
    char name[TENSOR_MAX_NAME];
    int n = snprintf(name, sizeof name, "%s%s", base, part);
    return n > 0 && n < TENSOR_MAX_NAME ? tensors_find(&m->tensors, name) : NULL;
}

static int missing(const char *base, const char *part, const char *why, struct err *e)
{
    return err_set(e, ERR_INPUT, "tensor %s%s is missing%s", base, part, why);
}

/* All elements as floats in the arena: scales are few, and need not be aligned in the file. */
static int read_scales(struct model *m, struct tensor *t, const float **out, size_t *n, struct err *e)
{
    struct dmat v;
    if (!tensor_count(t, n)) return tensor_too_large(t, e);
    struct tensor flat = *t;
    flat.n_dims = 1;
    flat.dims[0] = (int64_t)*n;
    TRY(model_vector(m, &flat, 1, (int64_t)*n, &v, e));
    t->used = true;
    float *f = arena_alloc(&m->arena, *n * sizeof *f);
    if (*n && !f) return err_set(e, ERR_NOMEM, "out of memory for %zu scales", *n);
    for (size_t i = 0; i < *n; i++) {
        dmat_row(&v, (int64_t)i, f + i);
        if (!isfinite(f[i]))
            return err_set(e, ERR_INPUT, "tensor %.*s: scale %zu is %g, expected a finite number", (int)t->name.len,
                           t->name.ptr, i, (double)f[i]);
    }
    *out = f;
    return OK;
}

static void whole_scale(struct dmat *w, const float *scale)
{
    w->scale = scale;
    w->scale_rows = w->rows;
    w->scale_cols = w->cols;
    w->scale_stride = 1;
}

static int fp8_scale(struct model *m, struct binding *b, struct tensor *t, struct dmat *w, struct err *e)
{
    const struct hf_scheme *s = &b->config->scheme;
    int64_t down = (w->rows + s->block_rows - 1) / s->block_rows,
            across = (w->cols + s->block_cols - 1) / s->block_cols;
    const float *scale;
    size_t n;
    TRY(read_scales(m, t, &scale, &n, e));
    bool column = t->n_dims == 1 || (t->n_dims == 2 && t->dims[1] == 1);
    if (n == 1) {
        whole_scale(w, scale);
        b->seen |= SEEN_TENSOR;
        return OK;
    }
    w->scale = scale;
    if (column && t->dims[0] == w->rows) {
        w->scale_rows = 1;
        w->scale_cols = w->cols;
        w->scale_stride = 1;
        b->seen |= SEEN_CHANNEL;
        return OK;
    }
    if (t->n_dims != 2 || t->dims[0] != down || t->dims[1] != across) {
        char shape[SHAPE_TEXT];
        shape_text(shape, t->n_dims, t->dims);
        return err_set(e, ERR_INPUT,
                       "tensor %.*s has shape %s, but for a weight [%" PRId64 ", %" PRId64 "] known are one value, "
                       "[%" PRId64 "], [%" PRId64 ", 1], and [%" PRId64 ", %" PRId64 "] for blocks of %" PRId64
                       "x%" PRId64,
                       (int)t->name.len, t->name.ptr, shape, w->rows, w->cols, w->rows, w->rows, down, across,
                       s->block_rows, s->block_cols);
    }
    w->scale_rows = s->block_rows;
    w->scale_cols = s->block_cols;
    w->scale_stride = across;
    b->seen |= SEEN_BLOCK;
    return OK;
}

static int bind_fp8(struct model *m, struct binding *b, const char *base, struct dmat *w, struct err *e)
{
    struct tensor *scale = sibling(m, base, ".weight_scale"), *inv = sibling(m, base, ".weight_scale_inv");
    if (!scale && !inv)
        return missing(base, ".weight_scale",
                       " (nor is there weight_scale_inv), and FP8 weights mean nothing without", e);
    if (scale && inv)
        return err_set(e, ERR_INPUT, "%s has both weight_scale and weight_scale_inv, expected one of them", base);
    return fp8_scale(m, b, scale ? scale : inv, w, e); /* both multiply, in spite of the name */
}

/* NVFP4: nibbles, block scales, one more scale, which compressed-tensors stores as its reciprocal. */
static int bind_nvfp4(struct model *m, struct binding *b, const char *base, struct tensor *t, bool reciprocal,
                      int64_t rows, int64_t cols, struct dmat *w, struct err *e)
{
    const char *second = reciprocal ? ".weight_global_scale" : ".weight_scale_2";
    struct tensor *block = sibling(m, base, ".weight_scale"), *global = sibling(m, base, second);
    const float *scale;
    size_t n;
    TRY(tensor_check_type(t, "U8", e));
    if (!block) return missing(base, ".weight_scale", ", and FP4 weights mean nothing without", e);
    if (!global) return missing(base, second, ", and NVFP4 weights mean nothing without", e);
    if (cols % 16)
        return err_set(e, ERR_INPUT, "%s has %" PRId64 " columns, NVFP4 takes a multiple of 16", base, cols);
    TRY(tensor_check_type(block, "F8_E4M3", e));
    TRY(tensor_check_shape(t, 2, (int64_t[]){rows, cols / 2}, e));
    TRY(tensor_check_shape(block, 2, (int64_t[]){rows, cols / 16}, e));
    TRY(read_scales(m, global, &scale, &n, e));
    if (n != 1) return err_set(e, ERR_INPUT, "tensor %s%s has %zu values, expected 1", base, second, n);
    if (reciprocal) {
        float *inverse = arena_alloc(&m->arena, sizeof *inverse);
        if (!inverse) return err_set(e, ERR_NOMEM, "out of memory");
        *inverse = 1 / *scale;
        if (!isfinite(*inverse))
            return err_set(e, ERR_INPUT, "tensor %s%s is %g, whose reciprocal is no number", base, second,
                           (double)*scale);
        scale = inverse;
    }
    *w = (struct dmat){.type = DT_NVFP4,
                       .rows = rows,
                       .cols = cols,
                       .data = t->data,
                       .row_stride = (size_t)cols / 2,
                       .bscale = block->data,
                       .bscale_stride = (size_t)cols / 16,
                       .map = t->map};
    whole_scale(w, scale);
    model_use(m, t);
    model_use(m, block);
    b->seen |= SEEN_NVFP4;
    return OK;
}

/* The matrix called base, whatever it is stored as. */
static int bind_matrix(struct model *m, struct binding *b, const char *base, int64_t rows, int64_t cols,
                       struct dmat *out, struct err *e)
{
    struct tensor *t = sibling(m, base, ".weight"), *packed = sibling(m, base, ".weight_packed");
    struct tensor *scale = sibling(m, base, ".weight_scale");
    if (!t && packed) return bind_nvfp4(m, b, base, packed, true, rows, cols, out, e);
    if (!t) return missing(base, ".weight", "", e);
    if (t->type == DT_NONE && scale) return bind_nvfp4(m, b, base, t, false, rows, cols, out, e);
    TRY(model_matrix(m, t, 1, rows, cols, out, e));
    if (t->type == DT_F8_E4M3) return bind_fp8(m, b, base, out, e);
    if (scale)
        return err_set(e, ERR_UNSUPPORTED,
                       "tensor %s.weight has type %.*s and a weight_scale beside it, which goes with "
                       "F8_E4M3 and U8 only",
                       base, (int)t->type_name.len, t->type_name.ptr);
    return OK;
}

/* ------------------------------------------------------------------------------------------ experts of gpt-oss */

/* Rows of gate and up alternate, so each is a view with twice the stride. */
static int bind_mxfp4(struct model *m, struct binding *b, enum role role, int layer, struct err *e)
{
    const struct model_config *c = &m->config;
    char base[TENSOR_MAX_NAME];
    int64_t rows, cols, step = role == ROLE_DOWN ? 1 : 2, begin = role == ROLE_UP;
    role_shape(c, role, &rows, &cols);
    snprintf(base, sizeof base, "%slayers.%d.mlp.experts.%s", b->prefix, layer,
             role == ROLE_DOWN ? "down_proj" : "gate_up_proj");
    struct tensor *blocks = sibling(m, base, "_blocks"), *scales = sibling(m, base, "_scales");
    if (!blocks && sibling(m, base, ""))
        return err_set(e, ERR_UNSUPPORTED,
                       "tensor %s is the de-quantised form, inputs before outputs, which is not known: use "
                       "the published MXFP4 checkpoint, or a GGUF file made from this one",
                       base);
    if (!blocks || !scales) return missing(base, blocks ? "_scales" : "_blocks", "", e);
    if (cols % 32)
        return err_set(e, ERR_INPUT, "%s has %" PRId64 " columns, MXFP4 takes a multiple of 32", base, cols);
    TRY(tensor_check_type(blocks, "U8", e));
    TRY(tensor_check_type(scales, "U8", e));
    TRY(tensor_check_shape(blocks, 4, (int64_t[]){c->n_experts, rows * step, cols / 32, 16}, e));
    TRY(tensor_check_shape(scales, 3, (int64_t[]){c->n_experts, rows * step, cols / 32}, e));
    size_t row = (size_t)cols / 2, brow = (size_t)cols / 32;
    for (int x = 0; x < c->n_experts; x++) {
        size_t first = (size_t)x * (size_t)(rows * step) + (size_t)begin;
        *role_slot(m, role, layer, x) = (struct dmat){.type = DT_MXFP4,
                                                      .rows = rows,
                                                      .cols = cols,
                                                      .data = blocks->data + first * row,
                                                      .row_stride = row * (size_t)step,
                                                      .bscale = scales->data + first * brow,
                                                      .bscale_stride = brow * (size_t)step,
                                                      .map = blocks->map};
    }
    model_use(m, blocks);
    model_use(m, scales);
    b->seen |= SEEN_MXFP4;
    return OK;
}

static int bind_expert_bias(struct model *m, const struct binding *b, enum role role, int layer, struct err *e)
{
    const struct model_config *c = &m->config;
    char base[TENSOR_MAX_NAME];
    bool down = role == ROLE_DOWN_BIAS;
    int64_t rows, cols, step = down ? 1 : 2, begin = role == ROLE_UP_BIAS;
    role_shape(c, role, &rows, &cols);
    snprintf(base, sizeof base, "%slayers.%d.mlp.experts.%s", b->prefix, layer, down ? "down_proj" : "gate_up_proj");
    struct tensor *t = sibling(m, base, "_bias");
    struct dmat all;
    if (!t) return missing(base, "_bias", "", e);
    TRY(model_vector(m, t, c->n_experts, rows * step, &all, e));
    for (int x = 0; x < c->n_experts; x++) {
        struct dmat v = all;
        v.rows = rows;
        v.data += ((size_t)x * (size_t)(rows * step) + (size_t)begin) * all.row_stride;
        v.row_stride = all.row_stride * (size_t)step;
        *role_slot(m, role, layer, x) = v;
    }
    return OK;
}

/* ------------------------------------------------------------------------------------------------ roles */

static void role_name(const struct model *m, const struct binding *b, enum role role, int layer, int expert,
                      char out[TENSOR_MAX_NAME])
{
    const char *name = names[role];
    bool ffn = role >= ROLE_GATE && role <= ROLE_DOWN;
    if (role == ROLE_ROUTER && m->config.family == FAMILY_GPT_OSS) name = "mlp.router";
    if (role_is_shared(role)) snprintf(out, TENSOR_MAX_NAME, "%s%s", b->prefix, name);
    else if (role_per_expert(m, role))
        snprintf(out, TENSOR_MAX_NAME, "%slayers.%d.mlp.experts.%d.%s", b->prefix, layer, expert, name);
    else snprintf(out, TENSOR_MAX_NAME, "%slayers.%d.%s%s", b->prefix, layer, ffn ? "mlp." : "", name);
}

/* The head stands beside the text tower, not in it. */
static bool find_head(const struct model *m, char out[TENSOR_MAX_NAME])
{
    static const char *const heads[] = {"lm_head", "language_model.lm_head"};
    for (size_t i = 0; i < COUNT_OF(heads); i++) {
        snprintf(out, TENSOR_MAX_NAME, "%s", heads[i]);
        if (sibling(m, out, ".weight") || sibling(m, out, ".weight_packed")) return true;
    }
    return false;
}

static int bind(struct model *m, enum role role, int layer, enum need need, void *with, struct err *e)
{
    struct binding *b = with;
    char name[TENSOR_MAX_NAME];
    int64_t rows, cols;
    (void)need; /* biases are bound where the configuration says so; the head where it is */
    if (m->config.family == FAMILY_GPT_OSS && role_per_expert(m, role))
        return role <= ROLE_DOWN ? bind_mxfp4(m, b, role, layer, e) : bind_expert_bias(m, b, role, layer, e);
    role_shape(&m->config, role, &rows, &cols);
    int experts = role_per_expert(m, role) ? m->config.n_experts : 1;
    for (int x = 0; x < experts; x++) {
        struct dmat *slot = role_slot(m, role, layer, x);
        role_name(m, b, role, layer, x, name);
        if (role == ROLE_HEAD && !find_head(m, name)) return OK;
        struct tensor *t = sibling(m, name, cols == 1 ? "" : ".weight");
        int64_t all = role_is_shared(role) && t && t->n_dims == 2 && t->dims[0] > rows ? t->dims[0] : rows;
        if (cols > 1) TRY(bind_matrix(m, b, name, all, cols, slot, e));
        else if (!t) return missing(name, "", "", e);
        else TRY(model_vector(m, t, 1, rows, slot, e));
        if (all > rows) *slot = dmat_rows(slot, 0, rows); /* a vocabulary padded beyond vocab_size */
    }
    return OK;
}

static int find_prefix(const struct model *m, struct binding *b, struct err *e)
{
    static const char *const prefixes[] = {"model.", "language_model.model.", "model.language_model."};
    for (size_t i = 0; i < COUNT_OF(prefixes); i++) {
        char base[TENSOR_MAX_NAME];
        snprintf(base, sizeof base, "%s%s", prefixes[i], names[ROLE_EMBED]);
        b->prefix = prefixes[i];
        if (sibling(m, base, ".weight")) return OK;
    }
    return missing("model.embed_tokens", ".weight", " (also behind language_model. and model.language_model.)", e);
}

/* A weight or bias inside a layer that no role took: the maths would be another than the checkpoint's. */
static int check_left_over(const struct model *m, const struct binding *b, struct err *e)
{
    static const char *const parts[] = {"weight", "bias", "weight_packed", "zero_point", "_blocks", "sinks"};
    char layers[TENSOR_MAX_NAME];
    snprintf(layers, sizeof layers, "%slayers.", b->prefix);
    for (size_t i = 0; i < m->tensors.n; i++) {
        const struct tensor *t = &m->tensors.items[i];
        if (t->used || !span_starts(t->name, layers)) continue;
        for (size_t k = 0; k < COUNT_OF(parts); k++)
            if (span_ends(t->name, parts[k]))
                return err_set(e, ERR_UNSUPPORTED,
                               "tensor %.*s is none that a model of family %s with %d layers and this "
                               "config.json has",
                               (int)t->name.len, t->name.ptr, family_names[m->config.family], m->config.n_layers);
    }
    return OK;
}

static int name_quantization(struct model *m, const struct binding *b, struct err *e)
{
    const struct hf_scheme *s = &b->config->scheme;
    char text[160];
    int n = snprintf(text, sizeof text, "%s", b->seen & ~(unsigned)SEEN_MXFP4 ? s->source : "");
    const char *sep = "";
    static const struct {
        unsigned bit;
        const char *name;
    } kinds[] = {{SEEN_TENSOR, "fp8 per tensor"},
                 {SEEN_CHANNEL, "fp8 per channel"},
                 {SEEN_NVFP4, "nvfp4"},
                 {SEEN_MXFP4, "mxfp4"}};
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        if (!(b->seen & kinds[i].bit)) continue;
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%s", sep, kinds[i].name);
        sep = ", ";
    }
    if (b->seen & SEEN_BLOCK)
        snprintf(text + n, sizeof text - (size_t)n, "%sfp8 in blocks of %" PRId64 "x%" PRId64, sep, s->block_rows,
                 s->block_cols);
    m->quantization = b->seen ? arena_str(&m->arena, span_of(text)) : "none";
    return m->quantization ? OK : err_set(e, ERR_NOMEM, "out of memory");
}

/* ------------------------------------------------------------------------------------------------ files */

static int path_in(char out[PATH_MAX], const struct model *m, const char *name, struct err *e)
{
    int n = snprintf(out, PATH_MAX, "%s/%s", m->path, name);
    if (n > 0 && n < PATH_MAX) return OK;
    return err_set(e, ERR_INPUT, "%s: the path of %.100s in it is longer than %d bytes", m->path, name, PATH_MAX - 1);
}

static int open_file(struct model *m, const char *name, struct err *e)
{
    char path[PATH_MAX];
    struct fmap *map = &m->maps[m->n_maps];
    size_t first = m->tensors.n;
    TRY(path_in(path, m, name, e));
    TRY(fmap_open(map, path, e));
    m->n_maps++;
    TRY(safetensors_parse(&m->tensors, map->data, map->len, map->path, &m->arena, e));
    for (size_t i = first; i < m->tensors.n; i++) m->tensors.items[i].map = map;
    return OK;
}

/* Drops the tensors from `first` on that the index places in another file than `file`. */
static void keep_indexed(struct tensors *t, size_t first, const json_t *index, const char *file)
{
    size_t keep = first;
    for (size_t i = first; i < t->n; i++) {
        const char *home =
            json_string_value(json_object_get(index, t->items[i].name.ptr)); /* names from JSON end in NUL */
        if (!home || strcmp(home, file) == 0) t->items[keep++] = t->items[i];
    }
    t->n = keep;
}

/* The different files that the index names. */
static int list_files(const json_t *index, const char **files, size_t *n, struct err *e)
{
    const char *name;
    json_t *value;
    *n = 0;
    json_object_foreach((json_t *)index, name, value)
    {
        const char *file = json_string_value(value);
        if (!file || strchr(file, '/') || !*file || *file == '.')
            return err_set(e, ERR_INPUT, "weight_map of %.200s is %.200s, expected a file name in the same directory",
                           name, file ? file : "no string");
        size_t i = *n;
        while (i > 0 && strcmp(files[i - 1], file) != 0) i--;
        if (i > 0) continue;
        if (*n == MAX_FILES) return err_set(e, ERR_UNSUPPORTED, "weight_map names more than %d files", MAX_FILES);
        files[(*n)++] = file;
    }
    return OK;
}

static int check_index(const struct model *m, const json_t *index, struct err *e)
{
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)index, name, file) if (!tensors_find(&m->tensors, name)) return err_set(
        e, ERR_INPUT, "weight_map places tensor %.200s in %.200s, which does not hold it", name,
        json_string_value(file));
    return OK;
}

static int open_indexed(struct model *m, const json_t *root, struct err *e)
{
    const json_t *index = NULL;
    const char **files;
    size_t n;
    TRY(hf_object(root, "weight_map", &index, e));
    if (!index || !json_object_size(index)) return err_set(e, ERR_INPUT, "weight_map is missing or empty");
    TRY(mem_new(&files, MAX_FILES * sizeof *files, e));
    int rc = list_files(index, files, &n, e);
    if (rc == OK) rc = mem_new(&m->maps, n * sizeof *m->maps, e);
    for (size_t i = 0; i < n && rc == OK; i++) {
        size_t first = m->tensors.n;
        rc = open_file(m, files[i], e);
        if (rc == OK) keep_indexed(&m->tensors, first, index, files[i]);
    }
    free(files);
    TRY(rc);
    TRY(tensors_index(&m->tensors, e));
    return check_index(m, index, e);
}

static int open_tensors(struct model *m, struct err *e)
{
    char path[PATH_MAX];
    struct buf text = {0};
    json_t *root;
    TRY(path_in(path, m, "model.safetensors.index.json", e));
    if (file_exists(path)) {
        TRY(file_read(&text, path, MAX_INDEX, e));
        int rc = hf_parse(&root, buf_span(&text), path, e);
        buf_free(&text);
        TRY(rc);
        rc = open_indexed(m, root, e);
        json_decref(root);
        return rc < 0 ? err_prefix(e, "%s", path) : OK;
    }
    TRY(path_in(path, m, "model.safetensors", e));
    if (!file_exists(path))
        return err_set(e, ERR_INPUT,
                       "%s: holds neither model.safetensors nor model.safetensors.index.json, and no other form "
                       "of weights is read from a directory (a GGUF model is named by its file)",
                       m->path);
    TRY(mem_new(&m->maps, sizeof *m->maps, e));
    TRY(open_file(m, "model.safetensors", e));
    return tensors_index(&m->tensors, e) < 0 ? err_prefix(e, "%s", path) : OK;
}

/* Reads one of the small JSON files; an optional one that is absent leaves text empty. */
static int read_text(const struct model *m, const char *name, char path[PATH_MAX], struct buf *text, struct err *e)
{
    TRY(path_in(path, m, name, e));
    return file_exists(path) ? file_read(text, path, MAX_CONFIG, e) : OK;
}

static int read_config(struct model *m, struct hf_config *config, struct err *e)
{
    char path[PATH_MAX];
    struct buf text = {0};
    TRY(read_text(m, "config.json", path, &text, e));
    if (!text.data)
        return err_set(e, ERR_INPUT, "%s: holds no config.json (a GGUF model is named by its file)", m->path);
    int rc = hf_config_parse(config, buf_span(&text), path, &m->arena, e);
    buf_free(&text);
    TRY(rc);
    TRY(read_text(m, "generation_config.json", path, &text, e));
    if (text.data) rc = hf_generation_parse(&config->c, buf_span(&text), path, e);
    buf_free(&text);
    TRY(rc);
    TRY(read_text(m, "hf_quant_config.json", path, &text, e));
    if (text.data) rc = hf_quant_parse(&config->scheme, buf_span(&text), path, e);
    buf_free(&text);
    return rc;
}

int hf_open(struct model *m, struct err *e)
{
    struct hf_config config;
    struct binding b = {.config = &config};
    m->container = "safetensors";
    TRY(read_config(m, &config, e));
    m->config = config.c;
    m->arch = config.arch;
    m->qkv_bias = config.qkv_bias ? NEED_MUST : NEED_NEVER;
    m->o_bias = config.o_bias ? NEED_MUST : NEED_NEVER;
    TRY(open_tensors(m, e));
    int rc = find_prefix(m, &b, e);
    if (rc == OK) rc = model_bind(m, bind, &b, e);
    if (rc == OK) rc = check_left_over(m, &b, e);
    if (rc == OK) rc = name_quantization(m, &b, e);
    return rc < 0 ? err_prefix(e, "%s", m->path) : OK;
}
