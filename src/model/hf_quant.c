/* hf_quant: the quantisation that a checkpoint declares. Which bytes mean what is decided by the tensors themselves
 * (see hf.c); the declaration refuses by name the schemes that are not done here, before a tensor could be mistaken,
 * and gives the size of scale blocks. */
#include <jansson.h>
#include <string.h>

#include "model_priv.h"

static bool one_of(const char *s, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(s, list[i]) == 0) return true;
    return false;
}

static int read_block(const json_t *o, const char *key, struct hf_scheme *s, struct err *e)
{
    const json_t *v = hf_get(o, key);
    if (!v) return OK;
    json_int_t rows = json_integer_value(json_array_get(v, 0)), cols = json_integer_value(json_array_get(v, 1));
    if (json_array_size(v) != 2 || rows < 1 || cols < 1 || rows > MAX_WIDTH || cols > MAX_WIDTH)
        return err_set(e, ERR_INPUT, "%s is not a pair of block sizes from 1 to %d", key, MAX_WIDTH);
    s->block_rows = rows;
    s->block_cols = cols;
    return OK;
}

static int read_fp8(const json_t *q, struct hf_scheme *s, struct err *e)
{
    const char *fmt = "e4m3";
    TRY(hf_text(q, "fmt", &fmt, e));
    if (strcmp(fmt, "e4m3") != 0 && strcmp(fmt, "float8_e4m3fn") != 0)
        return err_set(e, ERR_UNSUPPORTED, "fp8 of fmt %.40s, known is e4m3", fmt);
    return read_block(q, "weight_block_size", s, e);
}

static int read_modelopt(const json_t *q, struct hf_scheme *s, struct err *e)
{
    static const char *const known[] = {"FP8", "NVFP4"};
    const char *algo = NULL;
    TRY(hf_text(q, "quant_algo", &algo, e));
    s->source = "modelopt ";
    if (!algo || one_of(algo, known, COUNT_OF(known))) return OK;
    return err_set(e, ERR_UNSUPPORTED, "ModelOpt quant_algo is %.40s, known are FP8, NVFP4", algo);
}

static int check_format(const json_t *o, const char *where, struct err *e)
{
    static const char *const known[] = {"float-quantized", "naive-quantized", "nvfp4-pack-quantized", "dense"};
    const char *format = "dense";
    TRY(hf_text(o, "format", &format, e));
    if (one_of(format, known, COUNT_OF(known))) return OK;
    return err_set(e, ERR_UNSUPPORTED,
                   "compressed-tensors format%s is %.40s, known are float-quantized, naive-quantized, "
                   "nvfp4-pack-quantized",
                   where, format);
}

static int read_weights(const json_t *w, struct hf_scheme *s, struct err *e)
{
    const char *type = "float", *strategy = "tensor";
    bool symmetric = true;
    int64_t bits = 8;
    TRY(hf_text(w, "type", &type, e));
    TRY(hf_text(w, "strategy", &strategy, e));
    TRY(hf_flag(w, "symmetric", &symmetric, e));
    TRY(hf_int(w, "num_bits", 1, 64, &bits, e));
    static const char *const of8[] = {"tensor", "channel", "block"}, *const of4[] = {"tensor_group", "group"};
    bool good = bits == 8 ? one_of(strategy, of8, COUNT_OF(of8)) : bits == 4 && one_of(strategy, of4, COUNT_OF(of4));
    if (!good || strcmp(type, "float") != 0 || !symmetric)
        return err_set(e, ERR_UNSUPPORTED,
                       "compressed-tensors weights are %s %.20s of %d bits by %.20s, known are symmetric "
                       "float of 8 bits by tensor, channel or block, and of 4 bits by tensor_group",
                       symmetric ? "symmetric" : "asymmetric", type, (int)bits, strategy);
    return read_block(w, "block_structure", s, e);
}

static int read_compressed(const json_t *q, struct hf_scheme *s, struct err *e)
{
    const json_t *sparsity = NULL, *transform = NULL, *groups = NULL;
    const char *sparse = "dense", *name;
    s->source = "compressed-tensors ";
    TRY(check_format(q, "", e));
    TRY(hf_object(q, "sparsity_config", &sparsity, e));
    if (sparsity) TRY(hf_text(sparsity, "format", &sparse, e));
    if (strcmp(sparse, "dense") != 0)
        return err_set(e, ERR_UNSUPPORTED, "sparsity_config.format is %.40s, known is dense", sparse);
    TRY(hf_object(q, "transform_config", &transform, e));
    if (transform && json_object_size(hf_get(transform, "config_groups")))
        return err_set(e, ERR_UNSUPPORTED, "transform_config holds transforms, which are not known");
    TRY(hf_object(q, "config_groups", &groups, e));
    json_t *group;
    json_object_foreach((json_t *)groups, name, group)
    {
        const json_t *weights = NULL;
        if (!json_is_object(group)) return err_set(e, ERR_INPUT, "config_groups.%.40s is no object", name);
        TRY(check_format(group, " of a group", e));
        TRY(hf_object(group, "weights", &weights, e));
        if (weights) TRY(read_weights(weights, s, e));
    }
    return OK;
}

static int read_scheme(const json_t *q, struct hf_scheme *s, struct err *e)
{
    const char *method = hf_get(q, "quant_algo")      ? "modelopt"
                         : hf_get(q, "config_groups") ? "compressed-tensors"
                                                      : NULL;
    TRY(hf_text(q, "quant_method", &method, e));
    if (!method) return err_set(e, ERR_INPUT, "quant_method is missing");
    if (strcmp(method, "mxfp4") == 0) return OK;
    if (strcmp(method, "fp8") == 0) return read_fp8(q, s, e);
    if (strcmp(method, "modelopt") == 0 || strcmp(method, "modelopt_fp4") == 0) return read_modelopt(q, s, e);
    if (strcmp(method, "compressed-tensors") == 0) return read_compressed(q, s, e);
    return err_set(e, ERR_UNSUPPORTED, "quant_method is %.40s, known are fp8, mxfp4, modelopt, compressed-tensors",
                   method);
}

int hf_scheme_read(struct hf_scheme *s, const struct json_t *config, struct err *e)
{
    static const char *const keys[] = {"compression_config", "quantization_config"};
    *s = (struct hf_scheme){.source = "", .block_rows = 128, .block_cols = 128};
    for (size_t i = 0; i < COUNT_OF(keys); i++) {
        const json_t *q = NULL;
        TRY(hf_object(config, keys[i], &q, e));
        if (q && read_scheme(q, s, e) < 0) return err_prefix(e, "%s", keys[i]);
    }
    return OK;
}

int hf_quant_parse(struct hf_scheme *s, struct span json, const char *where, struct err *e)
{
    json_t *root;
    const json_t *q = NULL;
    TRY(hf_parse(&root, json, where, e));
    int rc = hf_object(root, "quantization", &q, e);
    if (rc == OK && q) rc = read_modelopt(q, s, e);
    json_decref(root);
    return rc < 0 ? err_prefix(e, "%s", where) : OK;
}
