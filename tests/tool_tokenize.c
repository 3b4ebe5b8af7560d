/* tool_tokenize: ids of many texts for the Python tests, in one process. Arguments: [--user] VOCABULARY, which is
 * a GGUF file, a checkpoint directory, a tekken.json or a tokenizer.json. Texts on standard input end with a NUL
 * byte each; for each, one line: the ids, a tab, and what they decode to in a stream, as hex. With --user each
 * text counts as written by a user. On standard error, at the end, the milliseconds that loading and encoding
 * took. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_priv.h"
#include "tokenizer.h"

static int open_gguf(struct tokenizer **t, const char *path, struct err *e)
{
    struct fmap file;
    struct gguf g = {0};
    struct tensors tensors = {0};
    struct arena arena = {0};
    struct model_vocab v = {.bos = -1, .eos = -1, .unk = -1, .add_bos = -1, .add_space_prefix = -1};
    TRY(fmap_open(&file, path, e));
    int rc = gguf_parse(&g, &tensors, file.data, file.len, path, &arena, e);
    if (rc == OK) rc = gguf_vocab(&v, &g, &arena, e);
    struct tokenizer_vocab tv = {.model = v.model,
                                 .pre = v.pre,
                                 .tokens = v.tokens,
                                 .types = v.types,
                                 .scores = v.scores,
                                 .n_tokens = v.n_tokens,
                                 .merges = v.merges,
                                 .n_merges = v.n_merges,
                                 .bos = v.bos,
                                 .eos = v.eos,
                                 .unk = v.unk,
                                 .add_bos = v.add_bos,
                                 .add_space_prefix = v.add_space_prefix};
    if (rc == OK) rc = tokenizer_from_vocab(t, &tv, path, e);
    tensors_free(&tensors);
    arena_free(&arena);
    fmap_close(&file);
    return rc;
}

static int open_vocabulary(struct tokenizer **t, const char *path, struct err *e)
{
    struct buf b = {0};
    if (file_is_dir(path)) return tokenizer_from_dir(t, path, NULL, e);
    if (span_ends(span_of(path), ".gguf")) return open_gguf(t, path, e);
    TRY(file_read(&b, path, 1 << 30, e));
    const char *name = strrchr(path, '/');
    int rc = (strstr(name ? name : path, "tekken") ? tokenizer_from_tekken : tokenizer_from_json)(t, buf_span(&b),
                                                                                                  path, e);
    buf_free(&b);
    return rc;
}

static int show(const struct tokenizer *t, const struct ids *ids)
{
    struct detok d = {0};
    struct buf text = {0};
    for (size_t i = 0; i < ids->len; i++) {
        printf("%s%d", i ? " " : "", ids->id[i]);
        TRY(detok_push(&d, t, ids->id[i], true, &text));
    }
    TRY(detok_end(&d, &text));
    putchar('\t');
    for (size_t i = 0; i < text.len; i++) printf("%02x", (unsigned char)text.data[i]);
    putchar('\n');
    buf_free(&text);
    return OK;
}

int main(int argc, char **argv)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    struct ids ids = {0};
    char *text = NULL;
    size_t cap = 0;
    ssize_t n;
    bool user = argc == 3 && !strcmp(argv[1], "--user");
    double start = clock_now(), encoding = 0;
    if (argc != 2 + user || open_vocabulary(&t, argv[1 + user], &e) < 0) {
        fprintf(stderr, "%s\n", e.code ? e.msg : "usage: tool_tokenize [--user] VOCABULARY");
        return 1;
    }
    double loading = clock_now() - start;
    while ((n = getdelim(&text, &cap, 0, stdin)) > 0) {
        struct span s = {text, (size_t)n - (text[n - 1] == 0)};
        struct mark all = {0, s.len};
        ids.len = 0;
        start = clock_now();
        int rc = tokenizer_encode(t, s, &all, user && s.len, false, &ids, &e);
        encoding += clock_now() - start;
        if (rc < 0) printf("%s\t\n", e.msg);
        else if (show(t, &ids) < 0) return 1;
    }
    fprintf(stderr, "%.1f %.1f\n", 1e3 * loading, 1e3 * encoding);
    free(text);
    ids_free(&ids);
    tokenizer_close(&t);
    return 0;
}
