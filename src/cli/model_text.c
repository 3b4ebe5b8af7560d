/* model_text.c: brings a model and its text together: the vocabulary and template inside a GGUF file, or the files of
 * a checkpoint directory. The rooms model and text do not know each other; this is where they meet. */
#include <string.h>

#include "cli.h"

enum { MAX_CONFIG = 16 << 20 };

/* model_type of config.json into out; empty where there is none. */
static int read_model_type(const char *dir, char out[64], struct err *e)
{
    struct buf path = {0}, text = {0};
    out[0] = 0;
    if (buf_appendf(&path, "%s/config.json", dir) < 0) return err_set(e, ERR_NOMEM, "out of memory for a path");
    int rc = file_exists(path.data) ? file_read(&text, path.data, MAX_CONFIG, e) : OK;
    if (rc == OK && text.len) {
        json_t *config = json_loadb(text.data, text.len, 0, NULL);
        const char *type = json_string_value(json_object_get(config, "model_type"));
        if (type) snprintf(out, 64, "%s", type);
        json_decref(config);
    }
    buf_free(&text);
    buf_free(&path);
    return rc;
}

static int tokenizer_of_dir(struct tokenizer **out, const char *dir, struct err *e)
{
    char type[64];
    TRY(read_model_type(dir, type, e));
    return tokenizer_from_dir(out, dir, type, e);
}

static int tokenizer_of_gguf(struct tokenizer **out, const struct model *m, struct err *e)
{
    const struct model_vocab *v = model_vocab(m);
    if (!v->n_tokens)
        return err_set(e, ERR_INPUT,
                       "%s: holds no vocabulary (tokenizer.ggml.tokens): only hearth logits works with it",
                       model_path(m));
    struct tokenizer_vocab t = {
        .model = v->model,
        .pre = v->pre,
        .tokens = v->tokens,
        .types = v->types,
        .scores = v->scores,
        .n_tokens = v->n_tokens,
        .merges = v->merges,
        .n_merges = v->n_merges,
        .bos = v->bos,
        .eos = v->eos,
        .unk = v->unk,
        .add_bos = v->add_bos,
        .add_space_prefix = v->add_space_prefix,
    };
    return tokenizer_from_vocab(out, &t, model_path(m), e);
}

static bool is_gguf(const struct model *m) { return !strcmp(model_container(m), "gguf"); }

static struct span token_text(const struct tokenizer *t, int64_t id)
{
    return id >= 0 && id < tokenizer_size(t) ? tokenizer_bytes(t, (int32_t)id) : (struct span){0};
}

int tokenizer_of_model(struct tokenizer **out, const struct model *m, struct err *e)
{
    return is_gguf(m) ? tokenizer_of_gguf(out, m, e) : tokenizer_of_dir(out, model_path(m), e);
}

int chat_of_model(struct chat **out, const struct model *m, const struct tokenizer *t, struct err *e)
{
    const struct model_vocab *v = model_vocab(m);
    *out = NULL;
    if (!is_gguf(m)) return chat_from_dir(out, model_path(m), e);
    if (!v->chat_template.len) return OK;
    return chat_from_template(out, v->chat_template, token_text(t, v->bos), token_text(t, v->eos),
                              "tokenizer.chat_template", e);
}

int tokenizer_of_path(struct tokenizer **out, const char *path, struct err *e)
{
    struct model *m;
    if (file_is_dir(path)) return tokenizer_of_dir(out, path, e);
    TRY(model_open(&m, path, e));
    int rc = tokenizer_of_gguf(out, m, e);
    model_close(&m);
    return rc;
}
