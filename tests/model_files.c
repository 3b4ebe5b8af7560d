/* model_files: see model_files.h. */
#include <dirent.h>
#include <inttypes.h>
#include <unistd.h>

#include "model_files.h"

struct err err;

const char llama_config[] = "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"]," LLAMA_SIZES
                            ",\"eos_token_id\":[2,3],\"bos_token_id\":1}";
const char gpt_oss_config[] =
    "{\"model_type\":\"gpt_oss\",\"hidden_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":4,"
    "\"num_key_value_heads\":2,\"head_dim\":16,\"intermediate_size\":32,\"vocab_size\":50,"
    "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-5,\"num_local_experts\":3,\"experts_per_token\":2,"
    "\"sliding_window\":128,\"eos_token_id\":7,\"swiglu_limit\":7.0,\"hidden_act\":\"silu\",\"rope_theta\":150000,"
    "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":32.0,\"beta_fast\":32.0,\"beta_slow\":1.0,"
    "\"original_max_position_embeddings\":4096,\"truncate\":false},"
    "\"quantization_config\":{\"quant_method\":\"mxfp4\"}}";
const char moe_config[] =
    "{\"architectures\":[\"Qwen3MoeForCausalLM\"],\"hidden_size\":64,\"num_hidden_layers\":2,"
    "\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,\"intermediate_size\":999,"
    "\"moe_intermediate_size\":32,\"vocab_size\":50,"
    "\"max_position_embeddings\":512,\"rms_norm_eps\":1e-6,\"num_experts\":3,\"num_experts_per_tok\":2,"
    "\"norm_topk_prob\":true,\"rope_theta\":10000000,\"decoder_sparse_step\":1,\"mlp_only_layers\":[],"
    "\"shared_expert_intermediate_size\":0,\"use_sliding_window\":false,\"sliding_window\":null,\"use_qk_norm\":true,"
    "\"qkv_bias\":false}";

char *temp_dir(void)
{
    static char dir[64];
    snprintf(dir, sizeof dir, "/tmp/test_model.XXXXXX");
    if (!mkdtemp(dir)) fail_msg("mkdtemp %s", dir);
    return dir;
}

void remove_dir(const char *dir)
{
    DIR *d = opendir(dir);
    struct dirent *entry;
    while (d && (entry = readdir(d))) {
        char path[600];
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        unlink(path);
    }
    if (d) closedir(d);
    rmdir(dir);
}

void write_file(const char *dir, const char *name, const void *data, size_t n)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) fail_msg("cannot write %s", path);
}

void write_text(const char *dir, const char *name, const char *text) { write_file(dir, name, text, strlen(text)); }

void append(struct buf *b, const void *data, size_t n) { assert_int_equal(buf_append(b, data, n), OK); }
void append_u32(struct buf *b, uint32_t v) { append(b, &v, 4); }
void append_u64(struct buf *b, uint64_t v) { append(b, &v, 8); }
void append_str(struct buf *b, const char *s)
{
    append_u64(b, strlen(s));
    append(b, s, strlen(s));
}

void add_line(struct items *t, const char *line)
{
    struct item *it = &t->at[t->n++];
    char dims[64] = "";
    assert_in_range(t->n, 1, MAX_ITEMS);
    *it = (struct item){0};
    assert_in_range(sscanf(line, "%127s %15s %63s", it->name, it->type, dims), 2, 3);
    for (char *p = dims; *p;) {
        it->dims[it->n_dims++] = strtoll(p, &p, 10);
        if (*p == ',') p++;
    }
}

static void add_lines(struct items *t, const char *const *lines, size_t n, int layers, int experts)
{
    for (size_t i = 0; i < n; i++) {
        int nl = strstr(lines[i], "%L") ? layers : 1, ne = strstr(lines[i], "%E") ? experts : 1;
        for (int l = 0; l < nl; l++) {
            for (int x = 0; x < ne; x++) {
                char line[256];
                size_t at = 0;
                for (const char *p = lines[i]; *p; p++) {
                    bool mark = *p == '%';
                    if (mark) at += (size_t)snprintf(line + at, sizeof line - at, "%d", *++p == 'L' ? l : x);
                    else line[at++] = *p;
                }
                line[at] = 0;
                add_line(t, line);
            }
        }
    }
}

struct item *find_item(struct items *t, const char *name)
{
    for (size_t i = 0; i < t->n; i++)
        if (strcmp(t->at[i].name, name) == 0) return &t->at[i];
    fail_msg("no item %s", name);
    return NULL;
}

void drop_item(struct items *t, const char *name)
{
    struct item *it = find_item(t, name);
    *it = t->at[--t->n];
}

size_t item_count(const struct item *it)
{
    size_t n = 1;
    for (int i = 0; i < it->n_dims; i++) n *= (size_t)it->dims[i];
    return n;
}

/* Bytes of one item: floats near 1, codes that are no NaN, all from the position and the name. */
static void append_values(struct buf *b, const struct item *it)
{
    size_t n = item_count(it);
    uint64_t seed = hash_bytes(HASH_START, it->name, strlen(it->name));
    for (size_t i = 0; i < n; i++) {
        uint8_t v = (uint8_t)((i * 31 + seed) % 113);
        float f = 0.5f + (float)v / 64;
        uint16_t h = strcmp(it->type, "BF16") == 0 ? f32_to_bf16(f) : f32_to_f16(f);
        if (strcmp(it->type, "F32") == 0) append(b, &f, 4);
        else if (strcmp(it->type, "BF16") == 0 || strcmp(it->type, "F16") == 0) append(b, &h, 2);
        else if (strcmp(it->type, "I32") == 0) append_u32(b, v);
        else append(b, &v, 1);
    }
}

struct buf safetensors_bytes(const struct items *t)
{
    struct buf head = {0}, data = {0}, out = {0};
    assert_int_equal(buf_appendf(&head, "{\"__metadata__\":{\"format\":\"pt\"}"), OK);
    for (size_t i = 0; i < t->n; i++) {
        const struct item *it = &t->at[i];
        size_t begin = data.len;
        append_values(&data, it);
        assert_int_equal(buf_appendf(&head, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", it->name, it->type), OK);
        for (int k = 0; k < it->n_dims; k++)
            assert_int_equal(buf_appendf(&head, "%s%" PRId64, k ? "," : "", it->dims[k]), OK);
        assert_int_equal(buf_appendf(&head, "],\"data_offsets\":[%zu,%zu]}", begin, data.len), OK);
    }
    append(&head, "}", 1);
    append_u64(&out, head.len);
    append(&out, head.data, head.len);
    if (data.len) append(&out, data.data, data.len);
    buf_free(&head);
    buf_free(&data);
    return out;
}

void write_checkpoint(const char *dir, const char *config, const struct items *t)
{
    struct buf b = safetensors_bytes(t);
    write_file(dir, "model.safetensors", b.data, b.len);
    write_text(dir, "config.json", config);
    buf_free(&b);
}

static const struct {
    const char *name;
    uint32_t id;
    size_t block, bytes;
} ggml_types[] = {{"F32", 0, 1, 4},      {"F16", 1, 1, 2},   {"Q4_0", 2, 32, 18},   {"Q8_0", 8, 32, 34},
                  {"Q2_K", 10, 256, 84}, {"BF16", 30, 1, 2}, {"MXFP4", 39, 32, 17}, {"NVFP4", 40, 64, 36}};

void append_kv(struct buf *b, const char *line)
{
    char key[96], type[8];
    int at = 0;
    assert_int_equal(sscanf(line, "%95s %7s %n", key, type, &at), 2);
    const char *v = line + at;
    append_str(b, key);
    struct buf items = {0};
    uint64_t n = 0;
    if (strcmp(type, "u32") == 0) append_u32(b, 4), append_u32(b, (uint32_t)strtoul(v, NULL, 10));
    else if (strcmp(type, "u64") == 0) append_u32(b, 10), append_u64(b, strtoull(v, NULL, 10));
    else if (strcmp(type, "i64") == 0) append_u32(b, 11), append_u64(b, (uint64_t)strtoll(v, NULL, 10));
    else if (strcmp(type, "f32") == 0) append_u32(b, 6), append(b, &(float){strtof(v, NULL)}, 4);
    else if (strcmp(type, "bool") == 0) append_u32(b, 7), append(b, *v == 't' ? "\1" : "", 1);
    else if (strcmp(type, "str") == 0) append_u32(b, 8), append_str(b, v);
    else {
        append_u32(b, 9);
        append_u32(b, strcmp(type, "strs") == 0 ? 8 : strcmp(type, "i32s") == 0 ? 5 : 6);
        while (*v) {
            char word[64];
            int used = 0;
            if (sscanf(v, "%63s %n", word, &used) < 1) break;
            if (strcmp(type, "strs") == 0) append_str(&items, word);
            else if (strcmp(type, "i32s") == 0) append(&items, &(int32_t){atoi(word)}, 4);
            else append(&items, &(float){strtof(word, NULL)}, 4);
            v += used;
            n++;
        }
        append_u64(b, n);
        if (items.len) append(b, items.data, items.len);
        buf_free(&items);
    }
}

static void append_tensor_info(struct buf *b, struct buf *data, const struct item *it)
{
    size_t type = 0;
    while (type < COUNT_OF(ggml_types) - 1 && strcmp(ggml_types[type].name, it->type) != 0) type++;
    append_str(b, it->name);
    append_u32(b, (uint32_t)it->n_dims);
    for (int k = it->n_dims - 1; k >= 0; k--) append_u64(b, (uint64_t)it->dims[k]);
    append_u32(b, ggml_types[type].id);
    append_u64(b, data->len);
    if (ggml_types[type].block == 1) {
        append_values(data, it);
    } else {
        struct item bytes = *it;
        snprintf(bytes.type, sizeof bytes.type, "U8");
        bytes.n_dims = 1;
        bytes.dims[0] = (int64_t)(item_count(it) / ggml_types[type].block * ggml_types[type].bytes);
        append_values(data, &bytes);
    }
    while (data->len % 32) append(data, "", 1);
}

struct buf gguf_bytes(const char *const *kv, size_t n_kv, const struct items *t)
{
    struct buf b = {0}, data = {0};
    append(&b, "GGUF", 4);
    append_u32(&b, 3);
    append_u64(&b, t->n);
    append_u64(&b, n_kv);
    for (size_t i = 0; i < n_kv; i++) append_kv(&b, kv[i]);
    for (size_t i = 0; i < t->n; i++) append_tensor_info(&b, &data, &t->at[i]);
    while (b.len % 32) append(&b, "", 1);
    if (data.len) append(&b, data.data, data.len);
    buf_free(&data);
    return b;
}

void write_gguf(const char *dir, const char *name, const char *const *kv, size_t n_kv, const struct items *t)
{
    struct buf b = gguf_bytes(kv, n_kv, t);
    write_file(dir, name, b.data, b.len);
    buf_free(&b);
}

int open_path(struct model **m, const char *dir, const char *name)
{
    char path[600];
    snprintf(path, sizeof path, "%s%s%s", dir, *name ? "/" : "", name);
    *m = NULL;
    return model_open(m, path, &err);
}

float value_of(const struct dmat *m, int64_t r, int64_t c)
{
    float *row = calloc((size_t)m->cols, sizeof *row), v;
    dmat_row(m, r, row);
    v = row[c];
    free(row);
    return v;
}

struct items *items_of(const char *const *lines, size_t n, int layers, int experts)
{
    static struct items t;
    t.n = 0;
    add_lines(&t, lines, n, layers, experts);
    return &t;
}
