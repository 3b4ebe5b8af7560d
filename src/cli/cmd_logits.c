/* cmd_logits.c: hearth logits: the logits of a plain forward pass over given ids, row by row to a .npy file. Needs no
 * tokenizer. */
#include <string.h>

#include "cli.h"

struct sink {
    struct npy npy;
    size_t vocab;
    int rc;
    struct err *e;
};

static void take_rows(void *user, int64_t pos, int n, const float *rows)
{
    struct sink *s = user;
    (void)pos; /* rows come in order */
    if (s->rc == OK) s->rc = npy_write(&s->npy, rows, (size_t)n * s->vocab, s->e);
}

static int read_ids(struct ids *out, const char *list, struct err *e)
{
    enum { MAX_LIST = 64 << 20 };
    struct buf text = {0};
    if (list[0] != '@') return parse_ids(out, "--ids", list, e);
    TRY(file_read(&text, list + 1, MAX_LIST, e));
    int rc = parse_ids(out, list + 1, text.data ? text.data : "", e);
    buf_free(&text);
    return rc;
}

static int forward_pass(struct sink *s, const struct model *m, const struct ids *ids, const struct engine_opts *eo,
                        struct err *e)
{
    struct engine *en;
    struct event ev;
    struct progress p;
    uint64_t id;
    int rc;
    struct request r = {.ids = ids->id, .n_ids = ids->len, .on_logits = take_rows, .user = s};
    TRY(engine_open(&en, m, eo, e));
    if ((rc = engine_submit(en, &r, &id, e)) < 0) goto out;
    if ((rc = npy_begin(&s->npy, ids->len, s->vocab, e)) < 0) goto out;
    progress_start(&p, "forward pass", "tokens", ids->len);
    for (int more = 1; rc == OK && more > 0;) {
        uint64_t before = engine_stats(en).prompt_tokens;
        more = engine_step(en, e);
        progress_add(&p, (size_t)(engine_stats(en).prompt_tokens - before));
        while (engine_poll(en, &ev)) {}
        rc = more < 0 ? more : s->rc;
    }
    progress_end(&p);
    if (rc == OK) rc = npy_end(&s->npy, e);
out:
    engine_close(&en);
    return rc;
}

int cmd_logits(int argc, char **argv, struct err *e)
{
    const char *model, *list = NULL, *path = NULL, *cpu = NULL, *device = DEVICE_DEFAULT;
    int64_t threads = 0, chunk = 0;
    const struct flag flags[] = {
        {"ids", 'i', FLAG_TEXT, &list, 0, 0, "LIST",
         "token ids, commas or spaces between; @FILE reads them from a file"},
        {"output", 'o', FLAG_TEXT, &path, 0, 0, "FILE", "where the float32 array [T, V] goes (.npy)"},
        {"chunk", 0, FLAG_INT, &chunk, 1, 65536, "N",
         "tokens computed at once; changes nothing in the result on a CPU"},
        FLAG_THREADS(&threads),
        FLAG_CPU(&cpu),
        FLAG_DEVICE(&device),
    };
    const struct usage u = {"logits",
                            "Writes the logits after each of the given ids to a NumPy file.",
                            "MODEL",
                            flags,
                            COUNT_OF(flags),
                            NULL,
                            "  hearth logits model.gguf --ids 1,2,3 -o out.npy\n"
                            "  hearth logits checkpoint/ --ids @ids.txt -o out.npy --cpu c\n"};
    struct ids ids = {0};
    struct buf dir = {0};
    struct model *m = NULL;
    struct sink s = {.e = e};
    int rc = flags_parse(&u, argc, argv, &model, e);
    if (rc) return rc < 0 ? rc : OK;
    if (!list) return err_set(e, ERR_INPUT, "--ids is missing: --ids 1,2,3");
    if (!path) return err_set(e, ERR_INPUT, "--output is missing: -o out.npy");
    rc = read_ids(&ids, list, e);
    if (rc == OK && !ids.len) rc = err_set(e, ERR_INPUT, "--ids names no id");
    if (rc == OK) rc = resolve_model(&dir, model, e);
    if (rc == OK) rc = model_open(&m, dir.data, e);
    if (rc == OK) rc = npy_open(&s.npy, path, e);
    if (rc == OK) {
        struct engine_opts eo = {.backend = {.device = device, .threads = (int)threads, .cpu_level = cpu},
                                 .max_seqs = 1,
                                 .chunk = (int)chunk};
        eo.ctx = ids.len > MAX_CTX ? MAX_CTX : (int)ids.len;
        s.vocab = (size_t)model_config(m)->n_vocab;
        rc = forward_pass(&s, m, &ids, &eo, e);
        if (rc < 0) npy_drop(&s.npy);
    }
    model_close(&m);
    buf_free(&dir);
    ids_free(&ids);
    return rc;
}
