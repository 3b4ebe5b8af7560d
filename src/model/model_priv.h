/* model_priv: what the files of this room share. Two containers (GGUF, a checkpoint directory of safetensors) are
 * parsed into one tensor table and one configuration; a family's roles are then bound to tensors once, with shape and
 * type checked, and nothing is looked up by name afterwards.
 *
 * The parsers (gguf_parse, safetensors_parse, hf_config_parse, ...) are pure functions over bytes: no I/O, nothing
 * trusted, nothing allocated that the bytes do not pay for. `where` is the file's path, for messages; what has
 * no such argument leaves the naming of the file to its caller (err_prefix). */
#ifndef HEARTH_MODEL_PRIV_H
#define HEARTH_MODEL_PRIV_H

#include <stdio.h>

#include "model.h"

/* ------------------------------------------------------------------------------------------------ tensors.c */

enum { TENSOR_MAX_DIMS = 8, TENSOR_MAX_NAME = 256, SHAPE_TEXT = 192 };

struct tensor {
    struct span name, type_name; /* type_name as the file spells it: "BF16", "U8", "Q4_K" */
    enum dtype type;             /* DT_NONE: not a type that a weight can have by itself */
    int n_dims;
    int64_t dims[TENSOR_MAX_DIMS]; /* outermost first, as PyTorch has them; GGUF's are turned round */
    const uint8_t *data;
    size_t bytes; /* 0 where the type's size is not known */
    const struct fmap *map;
    bool used;
};

/* Grows by tensors_push, is searched by name once tensors_index has run. Freed by tensors_free. */
struct tensors {
    struct tensor *items;
    size_t n, cap;
    uint32_t *slots; /* open addressing: index + 1 into items, 0 is free */
    size_t n_slots;  /* a power of two */
};
int tensors_push(struct tensors *t, const struct tensor *item, struct err *e) MUST_CHECK;
/* Builds the search table; a name that occurs twice is refused. */
int tensors_index(struct tensors *t, struct err *e) MUST_CHECK;
struct tensor *tensors_find(const struct tensors *t, const char *name);
/* Refuses a file in which two of the tensors [first, n) share bytes. */
int tensors_check_overlap(const struct tensors *t, size_t first, struct err *e) MUST_CHECK;
void tensors_free(struct tensors *t);

/* The product of the dimensions; false if it does not fit. */
bool tensor_count(const struct tensor *t, size_t *out);
/* "[4096, 2880]" */
void shape_text(char out[SHAPE_TEXT], int n, const int64_t *dims);
/* The error for a shape whose size does not fit. */
int tensor_too_large(const struct tensor *t, struct err *e);
/* Leading dimensions of 1 do not count: GGUF drops them, safetensors may keep them. */
int tensor_check_shape(const struct tensor *t, int n, const int64_t *dims, struct err *e) MUST_CHECK;
int tensor_check_type(const struct tensor *t, const char *want, struct err *e) MUST_CHECK;

uint64_t hash_bytes(uint64_t h, const void *data, size_t n);
#define HASH_START 0xcbf29ce484222325u

/* The limits of what a configuration may claim: beyond any model, and small enough that no product overflows. */
enum {
    MAX_LAYERS = 4096,
    MAX_WIDTH = 1 << 20,
    MAX_HEADS = 4096,
    MAX_FFN = 1 << 22,
    MAX_VOCAB = 1 << 24,
    MAX_EXPERTS = 4096
};

/* ------------------------------------------------------------------------------------------------ model.c */

/* Whether a layer of this family has a role at all. */
enum need { NEED_NEVER, NEED_MAY, NEED_MUST };

struct model {
    struct arena arena;
    struct fmap *maps;
    size_t n_maps;
    struct tensors tensors;
    struct model_config config;
    struct model_vocab vocab;
    const char *path, *name, *arch, *quantization, *container;
    enum need qkv_bias, o_bias;
    /* Absent ones are all zero. */
    struct dmat *shared;   /* [SHARED_ROLES]: embedding, last norm, head */
    struct dmat *layers;   /* [L][ROLE_COUNT] */
    struct dmat **experts; /* [L] -> [E][EXPERT_ROLES], where there are experts */
    size_t bytes;
};

enum { SHARED_ROLES = ROLE_ATTN_NORM, EXPERT_ROLES = ROLE_DOWN_BIAS - ROLE_GATE + 1 };
static inline bool role_is_shared(enum role role) { return role < ROLE_ATTN_NORM; }

/* Fills m from a file or a directory; m is zero but for path. On failure model_close cleans up. */
int gguf_open(struct model *m, struct err *e) MUST_CHECK;
int hf_open(struct model *m, struct err *e) MUST_CHECK;

/* The relations that every family obeys: heads divide, sizes fit each other. */
int config_check(const struct model_config *c, struct err *e) MUST_CHECK;
bool family_has_experts(enum family f);
int config_add_stop(struct model_config *c, int64_t id, struct err *e) MUST_CHECK;
/* c->window for all layers; *out is the same array, for those to be changed that differ. */
int config_windows(struct model_config *c, int32_t window, int32_t **out, struct arena *a, struct err *e) MUST_CHECK;

void role_shape(const struct model_config *c, enum role role, int64_t *rows, int64_t *cols);

/* Calls bind for every role that the family has, layer by layer. bind fills the slots that role_slot points at. */
typedef int bind_role(struct model *m, enum role role, int layer, enum need need, void *with, struct err *e);
int model_bind(struct model *m, bind_role *bind, void *with, struct err *e) MUST_CHECK;
struct dmat *role_slot(const struct model *m, enum role role, int layer, int expert);
bool role_per_expert(const struct model *m, enum role role);
/* The tensor is one of the model's: its bytes count, and its name goes into the fingerprint. */
void model_use(struct model *m, struct tensor *t);
/* t as W[rows, cols] (leading: how many such matrices are stacked; 1 where the tensor is the matrix) or as a vector
 * [n]: shape and type checked, the view of the first one in *out. */
int model_matrix(struct model *m, struct tensor *t, int64_t leading, int64_t rows, int64_t cols, struct dmat *out,
                 struct err *e) MUST_CHECK;
int model_vector(struct model *m, struct tensor *t, int64_t leading, int64_t n, struct dmat *out,
                 struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ rope.c */

enum rope_kind { ROPE_DEFAULT, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN };

struct rope_spec {
    enum rope_kind kind;
    double theta, factor;
    double low_freq, high_freq;  /* llama3 */
    double original;             /* positions before scaling: llama3, yarn */
    double beta_fast, beta_slow; /* yarn */
    double attention;            /* yarn: the factor on cos and sin, where stated; 0: by the formula */
    double mscale, mscale_all;   /* yarn: other forms of the formula; 0: not stated */
    double scale;                /* multiplies whatever factor came out; 1 in checkpoint directories */
    bool truncate;               /* yarn: round the ramp's ends outwards */
};
/* All that is not stated has its usual value. */
struct rope_spec rope_spec_new(void);
/* Fills c->rope_inv_freq and c->rope_mscale. divisors: GGUF's rope_freqs [Dh/2], or NULL. */
int rope_fill(struct model_config *c, const struct rope_spec *s, const float *divisors, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ gguf.c */

enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_TYPE_COUNT
};

struct gguf_kv {
    struct span key;
    enum gguf_type type; /* of the value, or of an array's elements */
    bool array;
    uint64_t count;    /* elements of an array, bytes of a string, else 1 */
    const uint8_t *at; /* the first element, unaligned */
};

struct gguf {
    struct gguf_kv *kv; /* in the arena given to gguf_parse */
    size_t n_kv;
    uint32_t version;
    size_t alignment, data_start;
};
/* Appends the file's tensors to t; everything borrows from data. */
int gguf_parse(struct gguf *g, struct tensors *t, const uint8_t *data, size_t len, const char *where, struct arena *a,
               struct err *e) MUST_CHECK;
const struct gguf_kv *gguf_find(const struct gguf *g, const char *key);

/* Values by key. Absent: *out keeps what it held. Present with another type or outside [min, max]: an error that
 * names the key and both values. An array of equal numbers is that number (per-layer lists). */
int gguf_int(const struct gguf *g, const char *key, int64_t min, int64_t max, int64_t *out, struct err *e) MUST_CHECK;
int gguf_float(const struct gguf *g, const char *key, double *out, struct err *e) MUST_CHECK;
int gguf_bool(const struct gguf *g, const char *key, int *out, struct err *e) MUST_CHECK;
int gguf_string(const struct gguf *g, const char *key, struct span *out, struct err *e) MUST_CHECK;
/* An array of strings, int32 or float, copied into the arena. */
int gguf_strings(const struct gguf *g, const char *key, const struct span **out, size_t *n, struct arena *a,
                 struct err *e) MUST_CHECK;
int gguf_ints(const struct gguf *g, const char *key, const int32_t **out, size_t *n, struct arena *a,
              struct err *e) MUST_CHECK;
int gguf_floats(const struct gguf *g, const char *key, const float **out, size_t *n, struct arena *a,
                struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ gguf_model.c */

/* The configuration of a GGUF file (its first part). t is indexed: the embedding's rows are the vocabulary, and
 * rope_freqs.weight bends the frequencies. */
int gguf_config(struct model *m, const struct gguf *g, struct err *e) MUST_CHECK;
int gguf_vocab(struct model_vocab *v, const struct gguf *g, struct arena *a, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ safetensors.c */

/* Appends the file's tensors to t; names go to the arena, data is borrowed. */
int safetensors_parse(struct tensors *t, const uint8_t *data, size_t len, const char *where, struct arena *a,
                      struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------------ hf_json.c */

struct json_t;
/* The text's object, to be released with json_decref. */
int hf_parse(struct json_t **out, struct span text, const char *where, struct err *e) MUST_CHECK;
/* The member, or NULL where it is absent or null. */
const struct json_t *hf_get(const struct json_t *o, const char *key);
/* Absent or null: *out keeps what it held. */
int hf_int(const struct json_t *o, const char *key, int64_t min, int64_t max, int64_t *out, struct err *e) MUST_CHECK;
int hf_float(const struct json_t *o, const char *key, double *out, struct err *e) MUST_CHECK;
int hf_flag(const struct json_t *o, const char *key, bool *out, struct err *e) MUST_CHECK;
int hf_text(const struct json_t *o, const char *key, const char **out, struct err *e) MUST_CHECK;
int hf_object(const struct json_t *o, const char *key, const struct json_t **out, struct err *e) MUST_CHECK;

/* ------------------------------------------------------------------------------------------ hf_config.c, hf_quant.c
 */

/* What config.json and hf_quant_config.json declare. Tensors decide what is done; this is for the name people read,
 * for the size of scale blocks, and for refusing what is not done here. */
struct hf_scheme {
    const char *source;             /* "", "modelopt ", "compressed-tensors ": goes before the format's name */
    int64_t block_rows, block_cols; /* of FP8 scale grids */
};

struct hf_config {
    struct model_config c;
    const char *arch; /* in the arena */
    bool qkv_bias, o_bias;
    struct hf_scheme scheme;
};

int hf_config_parse(struct hf_config *out, struct span json, const char *where, struct arena *a,
                    struct err *e) MUST_CHECK;
/* generation_config.json: adds stop ids and sampling defaults. */
int hf_generation_parse(struct model_config *c, struct span json, const char *where, struct err *e) MUST_CHECK;
/* quantization_config or compression_config inside a parsed config.json. */
int hf_scheme_read(struct hf_scheme *s, const struct json_t *config, struct err *e) MUST_CHECK;
/* hf_quant_config.json, the side file of ModelOpt. */
int hf_quant_parse(struct hf_scheme *s, struct span json, const char *where, struct err *e) MUST_CHECK;

#endif
