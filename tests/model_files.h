/* model_files: tiny models for tests, written as checkpoint directories and GGUF files. A model is a table of lines
 * "name TYPE dim,dim", so that a test can drop or bend any one tensor; %L in a line stands for each layer, %E for
 * each expert. What fails here ends the test. */
#ifndef MODEL_FILES_H
#define MODEL_FILES_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"

extern struct err err; /* of the last call in a test */

#define GOOD(call)                                                                                                   \
    do {                                                                                                             \
        int rc_ = (call);                                                                                            \
        if (rc_ != OK) fail_msg("%s: %s", #call, err.msg);                                                           \
    } while (0)

/* The call must fail, and its one line must hold the text. */
#define REFUSED(call, text)                                                                                          \
    do {                                                                                                             \
        int rc_ = (call);                                                                                            \
        if (rc_ >= 0) fail_msg("%s: was accepted, expected: %s", #call, text);                                       \
        if (!strstr(err.msg, text) || strchr(err.msg, '\n')) fail_msg("message '%s', expected '%s'", err.msg, text); \
    } while (0)

enum { MAX_ITEMS = 256 };

struct item {
    char name[128], type[16];
    int n_dims;
    int64_t dims[6];
};

struct items {
    struct item at[MAX_ITEMS];
    size_t n;
};

/* A new directory under /tmp; the string is valid until the next call. */
char *temp_dir(void);
void remove_dir(const char *dir);
void write_file(const char *dir, const char *name, const void *data, size_t n);
void write_text(const char *dir, const char *name, const char *text);

void append(struct buf *b, const void *data, size_t n);
void append_u32(struct buf *b, uint32_t v);
void append_u64(struct buf *b, uint64_t v);
void append_str(struct buf *b, const char *s);

struct items *items_of(const char *const *lines, size_t n, int layers, int experts);
#define ITEMS(lines, layers, experts) items_of(lines, COUNT_OF(lines), layers, experts)
void add_line(struct items *t, const char *line);
struct item *find_item(struct items *t, const char *name);
void drop_item(struct items *t, const char *name);
size_t item_count(const struct item *it);

/* config.json of three families, two layers each. */
#define LLAMA_SIZES                                                                                                  \
    "\"hidden_size\":64,\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_value_heads\":2,"                \
    "\"intermediate_size\":96,\"vocab_size\":50,\"max_position_embeddings\":256,\"rms_norm_eps\":1e-5"
extern const char llama_config[];
extern const char gpt_oss_config[];
extern const char moe_config[];

/* Values are a pattern: element i of a tensor is 0.5 + ((31 i + hash of its name) % 113) / 64, or that code as a
 * byte. */
struct buf safetensors_bytes(const struct items *t);
void write_checkpoint(const char *dir, const char *config, const struct items *t);
/* One metadata entry, "key type value": u32, u64, i64, f32, bool, str, strs (words), i32s, f32s (numbers). */
void append_kv(struct buf *b, const char *line);
struct buf gguf_bytes(const char *const *kv, size_t n_kv, const struct items *t);
void write_gguf(const char *dir, const char *name, const char *const *kv, size_t n_kv, const struct items *t);

int open_path(struct model **m, const char *dir, const char *name);
/* Element (r, c). */
float value_of(const struct dmat *m, int64_t r, int64_t c);

#endif
