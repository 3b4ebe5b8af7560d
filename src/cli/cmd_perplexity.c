/* cmd_perplexity.c: hearth perplexity, as llama.cpp defines it: the text is cut into chunks of ctx tokens that do not
 * overlap; each is run by itself, its first token replaced by BOS where the model wants one; of each chunk the tokens
 * of the second half are scored, so that every one has at least ctx/2 tokens before it. */
#include <math.h>

#include "cli.h"

struct score {
    const int32_t *ids; /* [ctx] the chunk */
    int64_t first, ctx; /* logits of positions first .. ctx-2 are scored */
    int n_vocab;
    double nll, nll2; /* sums of the negative log-likelihood and of its square */
    size_t count;
};

static void score_rows(void *user, int64_t pos, int n, const float *rows)
{
    struct score *s = user;
    for (int r = 0; r < n; r++, pos++, rows += s->n_vocab) {
        if (pos < s->first || pos > s->ctx - 2) continue;
        float max = rows[0];
        double sum = 0;
        for (int v = 1; v < s->n_vocab; v++) max = rows[v] > max ? rows[v] : max;
        for (int v = 0; v < s->n_vocab; v++) sum += (double)expf(rows[v] - max);
        double nll = log(sum) - (double)(rows[s->ids[pos + 1]] - max);
        s->nll += nll;
        s->nll2 += nll * nll;
        s->count++;
    }
}

static int run_chunk(struct engine *en, struct score *s, int32_t *ids, int32_t bos, struct progress *p, struct err *e)
{
    struct event ev;
    struct request r = {.ids = ids, .n_ids = (size_t)s->ctx, .on_logits = score_rows, .user = s};
    int32_t kept = ids[0];
    uint64_t id;
    s->ids = ids;
    if (bos >= 0) ids[0] = bos;
    int rc = engine_submit(en, &r, &id, e);
    for (int more = rc == OK; more > 0;) {
        uint64_t before = engine_stats(en).prompt_tokens;
        more = engine_step(en, e);
        if (more < 0) rc = more;
        progress_add(p, (size_t)(engine_stats(en).prompt_tokens - before));
        while (engine_poll(en, &ev)) {}
    }
    ids[0] = kept;
    return rc;
}

struct result {
    double ppl, error;
    size_t chunks, scored;
};

static int measure(struct result *out, struct engine *en, const struct ids *ids, int64_t ctx, int32_t bos,
                   struct err *e)
{
    struct score s = {.first = ctx / 2, .ctx = ctx, .n_vocab = engine_config(en)->n_vocab};
    size_t chunks = ids->len / (size_t)ctx;
    struct progress p;
    int rc = OK;
    progress_start(&p, "perplexity", "tokens", chunks * (size_t)ctx);
    for (size_t i = 0; i < chunks && rc == OK; i++) rc = run_chunk(en, &s, ids->id + i * (size_t)ctx, bos, &p, e);
    progress_end(&p);
    TRY(rc);
    double mean = s.nll / (double)s.count, variance = s.nll2 / (double)s.count - mean * mean;
    if (!isfinite(mean)) return err_set(e, ERR_INPUT, "the model's logits hold no numbers: its weights are damaged");
    *out = (struct result){.ppl = exp(mean), .chunks = chunks, .scored = s.count};
    out->error = variance > 0 && s.count > 1 ? sqrt(variance / (double)(s.count - 1)) * out->ppl : 0;
    return OK;
}

static int print(const struct result *r, const struct model *m, const struct engine *en, size_t tokens, int64_t ctx,
                 double seconds, bool json, struct err *e)
{
    double rate = (double)(r->chunks * (size_t)ctx) / seconds;
    if (!json) {
        printf("PPL = %.4f +/- %.5f  (%zu chunks of %lld tokens, %zu scored, %.1f tok/s)\n", r->ppl, r->error,
               r->chunks, (long long)ctx, r->scored, rate);
        return out_flush(e);
    }
    json_t *o =
        json_pack("{s:s, s:f, s:f, s:I, s:I, s:I, s:I, s:f, s:s}", "model", model_name(m), "ppl", r->ppl, "error",
                  r->error, "tokens", (json_int_t)tokens, "context", (json_int_t)ctx, "chunks", (json_int_t)r->chunks,
                  "scored", (json_int_t)r->scored, "tok_s", rate, "device", engine_device(en));
    return out_json(o, JSON_COMPACT, e);
}

static int encode_file(struct ids *out, const struct tokenizer *t, const char *file, int64_t ctx, struct err *e)
{
    struct fmap text;
    TRY(fmap_open(&text, file, e));
    int rc = tokenizer_encode(t, (struct span){(const char *)text.data, text.len}, NULL, 0, true, out, e);
    if (rc < 0) rc = err_prefix(e, "%s", file);
    fmap_close(&text);
    TRY(rc);
    if (out->len < 2 * (size_t)ctx)
        return err_set(
            e, ERR_INPUT,
            "%s: has %zu tokens, and a context of %lld needs at least %lld: take a longer text or a smaller "
            "--ctx",
            file, out->len, (long long)ctx, (long long)(2 * ctx));
    return OK;
}

int cmd_perplexity(int argc, char **argv, struct err *e)
{
    const char *operands[2], *cpu = NULL, *device = DEVICE_DEFAULT;
    int64_t ctx = 512, threads = 0;
    bool json = false;
    const struct flag flags[] = {
        {"ctx", 'c', FLAG_INT, &ctx, 4, MAX_CTX, "N", "tokens of a chunk (default: 512)"},
        FLAG_THREADS(&threads),
        FLAG_CPU(&cpu),
        FLAG_DEVICE(&device),
        {"json", 0, FLAG_SWITCH, &json, 0, 0, NULL, "print one JSON object"},
    };
    const struct usage u = {
        "perplexity",
        "Measures the perplexity of a model on a text, as llama.cpp defines it.",
        "MODEL FILE",
        flags,
        COUNT_OF(flags),
        "The text is cut into chunks of N tokens that do not overlap; each chunk is run by itself (its first\n"
        "token replaced by BOS where the model wants one), and the tokens of its second half are scored.\n",
        "  hearth perplexity model.gguf wiki.test.raw\n"
        "  hearth perplexity model.gguf book.txt --ctx 2048 --json\n"};
    struct buf path = {0};
    struct model *m = NULL;
    struct tokenizer *tok = NULL;
    struct engine *en = NULL;
    struct ids ids = {0};
    struct result result = {0};
    int rc = flags_parse(&u, argc, argv, operands, e);
    if (rc) return rc < 0 ? rc : OK;
    if ((rc = resolve_model(&path, operands[0], e)) < 0) goto out;
    if ((rc = model_open(&m, path.data, e)) < 0) goto out;
    if ((rc = tokenizer_of_model(&tok, m, e)) < 0) goto out;
    if ((rc = encode_file(&ids, tok, operands[1], ctx, e)) < 0) goto out;
    struct engine_opts eo = {.backend = {.device = device, .threads = (int)threads, .cpu_level = cpu},
                             .ctx = (int)ctx,
                             .max_seqs = 1};
    if ((rc = engine_open(&en, m, &eo, e)) < 0) goto out;
    double started = clock_now();
    int32_t bos = tokenizer_adds_bos(tok) ? tokenizer_bos(tok) : -1;
    if ((rc = measure(&result, en, &ids, ctx, bos, e)) < 0) goto out;
    rc = print(&result, m, en, ids.len, ctx, clock_now() - started, json, e);
out:
    engine_close(&en);
    ids_free(&ids);
    tokenizer_close(&tok);
    model_close(&m);
    buf_free(&path);
    return rc;
}
