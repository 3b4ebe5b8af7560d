/* cmd_info.c: hearth info: what a checkpoint is, in what formats its weights are stored, and what context fits into
 * the memory that is free here. Reads headers only. */
#include <string.h>

#include "cli.h"

/* Roles as people speak of them. */
enum class { CLASS_EMBED, CLASS_ATTENTION, CLASS_FFN, CLASS_ROUTER, CLASS_HEAD, CLASS_NORMS, CLASS_COUNT };

struct usage_of_type {
    size_t bytes, tensors;
};
struct census {
    struct usage_of_type by[CLASS_COUNT][DT_COUNT];
};

/* What fits: the plan for `ctx`, and whether it is all that the model was made for. */
struct fit {
    struct engine_bytes bytes;
    int ctx;        /* the largest that fits; 0: none */
    size_t missing; /* bytes, where none fits */
};

struct info {
    const struct model *m;
    const char *device;
    const struct model_config *c;
    struct census census;
    struct fit fit;
    struct tokenizer *tok;
    struct chat *chat;
    struct err tok_error, chat_error; /* why there is none */
};

static const char *class_name(enum class k, const struct model_config *c)
{
    static const char *const names[] = {"embedding", "attention", "ffn", "router", "head", "norms and biases"};
    return k == CLASS_FFN && c->n_experts ? "experts" : names[k];
}

static enum class class_of(enum role role) {
    switch (role){
        case ROLE_EMBED : return CLASS_EMBED; case ROLE_HEAD : return CLASS_HEAD;
        case ROLE_Q : case ROLE_K : case ROLE_V : case ROLE_O : return CLASS_ATTENTION;
        case ROLE_GATE : case ROLE_UP : case ROLE_DOWN : return CLASS_FFN;
        case ROLE_ROUTER : return CLASS_ROUTER;
        default : return CLASS_NORMS;
    }
}

static bool is_shared(enum role role) { return role == ROLE_EMBED || role == ROLE_OUT_NORM || role == ROLE_HEAD; }

static bool is_per_expert(enum role role)
{
    return role == ROLE_GATE || role == ROLE_UP || role == ROLE_DOWN || role == ROLE_GATE_BIAS ||
           role == ROLE_UP_BIAS || role == ROLE_DOWN_BIAS;
}

static void count(struct info *in, enum role role, int layer, int expert)
{
    if (!model_has(in->m, role, layer, expert)) return;
    struct dmat d = model_mat(in->m, role, layer, expert);
    struct usage_of_type *u = &in->census.by[class_of(role)][d.type];
    u->bytes += dmat_bytes(&d);
    u->tensors++;
}

static void take_census(struct info *in)
{
    for (int role = 0; role < ROLE_COUNT; role++) {
        int layers = is_shared(role) ? 1 : in->c->n_layers;
        int experts = in->c->n_experts && is_per_expert(role) ? in->c->n_experts : 1;
        if (role == ROLE_HEAD && in->c->tied) continue;
        for (int l = 0; l < layers; l++)
            for (int x = 0; x < experts; x++) count(in, role, l, x);
    }
}

static size_t plan_total(const struct engine_bytes *b) { return b->weights + b->kv + b->scratch; }

/* KV grows by whole pages and all else stays, so two plans tell every context. */
static int find_fit(struct info *in, struct err *e)
{
    struct engine_opts all = {.backend = {.device = in->device}, .ctx = in->c->ctx_train, .max_seqs = 1};
    struct engine_opts page = {.backend = {.device = in->device}, .ctx = KV_PAGE, .max_seqs = 1};
    struct engine_bytes whole, one;
    if (in->c->ctx_train < KV_PAGE) page.ctx = in->c->ctx_train;
    TRY(engine_plan_bytes(in->m, &all, &whole, e));
    TRY(engine_plan_bytes(in->m, &page, &one, e));
    if (plan_total(&whole) <= whole.free) {
        in->fit = (struct fit){.bytes = whole, .ctx = in->c->ctx_train};
        return OK;
    }
    size_t fixed = one.weights + one.scratch, pages = fixed < one.free ? (one.free - fixed) / one.kv : 0;
    in->fit.bytes = one;
    in->fit.bytes.kv = (pages ? pages : 1) * one.kv;
    in->fit.ctx = (int)(pages * KV_PAGE < (size_t)in->c->ctx_train ? pages * KV_PAGE : (size_t)in->c->ctx_train);
    in->fit.missing = pages ? 0 : fixed + one.kv - one.free;
    return OK;
}

/* ------------------------------------------------------------------------------------------------ for people */

static const char *size_text(size_t bytes, char out[32])
{
    if (bytes >= 1000000000) snprintf(out, 32, "%.2f GB", (double)bytes / 1e9);
    else if (bytes >= 1000000) snprintf(out, 32, "%.1f MB", (double)bytes / 1e6);
    else snprintf(out, 32, "%.1f kB", (double)bytes / 1e3);
    return out;
}

static void print_shapes(const struct model_config *c)
{
    printf("shapes       %d layers, width %d, %d heads over %d KV heads of %d, ", c->n_layers, c->d_model, c->n_heads,
           c->n_kv_heads, c->d_head);
    if (c->n_experts) printf("%d experts of %d (%d used), ", c->n_experts, c->d_ff, c->n_experts_used);
    else printf("FFN %d, ", c->d_ff);
    printf("vocabulary %d%s, context %d", c->n_vocab, c->tied ? " (head tied to the embedding)" : "", c->ctx_train);
    int windowed = 0, window = 0;
    for (int l = 0; l < c->n_layers; l++)
        if (c->window[l] > 0) {
            windowed++;
            window = c->window[l];
        }
    if (windowed) printf(", window %d in %d layers", window, windowed);
    putchar('\n');
}

static void print_census(const struct info *in)
{
    char size[32];
    puts("weights");
    for (int k = 0; k < CLASS_COUNT; k++)
        for (int t = 0; t < DT_COUNT; t++) {
            const struct usage_of_type *u = &in->census.by[k][t];
            if (u->tensors)
                printf("  %-18s %-8s %10s in %zu tensor%s\n", class_name(k, in->c), dtype_infos[t].name,
                       size_text(u->bytes, size), u->tensors, u->tensors == 1 ? "" : "s");
        }
    printf("  %-18s %-8s %10s\n", "total", "", size_text(model_bytes(in->m), size));
}

static void print_fit(const struct info *in)
{
    const struct fit *f = &in->fit;
    char w[32], kv[32], s[32], have[32], need[32];
    size_text(f->bytes.weights, w);
    size_text(f->bytes.kv, kv);
    size_text(f->bytes.scratch, s);
    size_text(f->bytes.free, have);
    printf("device       %s\n", f->bytes.device);
    if (f->missing) {
        printf(
            "fits here    no: weights %s, scratch %s and %s for the smallest context; %s are free, %s are missing\n",
            w, s, kv, have, size_text(f->missing, need));
        return;
    }
    printf("fits here    yes: context up to %d%s takes %s (weights %s, KV %s, scratch %s) of %s free\n", f->ctx,
           f->ctx == in->c->ctx_train ? " (all the model knows)" : "", size_text(plan_total(&f->bytes), need), w, kv,
           s, have);
}

static void print_text(const struct info *in)
{
    if (!in->tok) {
        printf("tokenizer    not usable: %s\n", in->tok_error.msg);
        return;
    }
    printf("tokenizer    %s, %d ids, %s\n", tokenizer_kind(in->tok), tokenizer_size(in->tok),
           tokenizer_adds_bos(in->tok) ? "BOS in front" : "no BOS in front");
    if (in->chat) printf("template     %s\n", chat_origin(in->chat));
    else printf("template     %s\n", in->chat_error.msg[0] ? in->chat_error.msg : "none: text is continued as it is");
}

static int print_info(const struct info *in, struct err *e)
{
    printf("model        ");
    TRY(out_text(span_of(model_name(in->m)), e));
    printf("\npath         ");
    TRY(out_text(span_of(model_path(in->m)), e));
    putchar('\n');
    printf("family       %s (%s, %s)\n", family_names[in->c->family], model_arch(in->m), model_container(in->m));
    printf("quantised    %s\n", model_quantization(in->m));
    print_shapes(in->c);
    print_census(in);
    print_text(in);
    print_fit(in);
    return out_flush(e);
}

/* ------------------------------------------------------------------------------------------------ for programs */

static json_t *json_census(const struct info *in)
{
    json_t *list = json_array();
    for (int k = 0; k < CLASS_COUNT; k++)
        for (int t = 0; t < DT_COUNT; t++) {
            const struct usage_of_type *u = &in->census.by[k][t];
            if (u->tensors)
                json_array_append_new(list, json_pack("{s:s, s:s, s:I, s:I}", "class", class_name(k, in->c), "format",
                                                      dtype_infos[t].name, "bytes", (json_int_t)u->bytes, "tensors",
                                                      (json_int_t)u->tensors));
        }
    return list;
}

static json_t *json_config(const struct model_config *c)
{
    return json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:b}", "layers", c->n_layers, "width",
                     c->d_model, "heads", c->n_heads, "kv_heads", c->n_kv_heads, "head_width", c->d_head, "ffn",
                     c->d_ff, "experts", c->n_experts, "experts_used", c->n_experts_used, "vocabulary", c->n_vocab,
                     "context", c->ctx_train, "tied", c->tied);
}

static int print_json(const struct info *in, struct err *e)
{
    const struct fit *f = &in->fit;
    json_t *o = json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:o, s:o, s:I, s:s?, s:i, s:s?, s:{s:b, s:i, s:I, s:I, s:I, s:I, s:I}, s:s}",
        "model", model_name(in->m), "path", model_path(in->m), "family", family_names[in->c->family], "arch",
        model_arch(in->m), "container", model_container(in->m), "quantization", model_quantization(in->m), "shapes",
        json_config(in->c), "weights", json_census(in), "bytes", (json_int_t)model_bytes(in->m), "tokenizer",
        in->tok ? tokenizer_kind(in->tok) : NULL, "tokens", in->tok ? (int)tokenizer_size(in->tok) : 0, "template",
        in->chat ? chat_origin(in->chat) : NULL, "fit", "fits", !f->missing, "context", f->ctx, "weights",
        (json_int_t)f->bytes.weights, "kv", (json_int_t)f->bytes.kv, "scratch", (json_int_t)f->bytes.scratch, "free",
        (json_int_t)f->bytes.free, "missing", (json_int_t)f->missing, "device",
        f->bytes.device);
    return out_json(o, JSON_INDENT(2), e);
}

int cmd_info(int argc, char **argv, struct err *e)
{
    const char *model;
    bool json = false;
    const char *device = DEVICE_DEFAULT;
    const struct flag flags[] = {
        FLAG_DEVICE(&device),
        {"json", 0, FLAG_SWITCH, &json, 0, 0, NULL, "print one JSON object"},
    };
    const struct usage u = {
        "info",
        "Shows what a model is, how its weights are stored, and what context fits into memory here.",
        "MODEL",
        flags,
        COUNT_OF(flags),
        NULL,
        "  hearth info model.gguf\n"
        "  hearth info Qwen/Qwen3-0.6B --json\n"};
    struct buf path = {0};
    struct model *m = NULL;
    struct info in = {0};
    int rc = flags_parse(&u, argc, argv, &model, e);
    if (rc) return rc < 0 ? rc : OK;
    rc = resolve_model(&path, model, e);
    if (rc == OK) rc = model_open(&m, path.data, e);
    if (rc == OK) {
        in.m = m;
        in.device = device;
        in.c = model_config(m);
        take_census(&in);
        rc = find_fit(&in, e);
    }
    /* A model without a usable tokenizer still has shapes and logits: that is something to show, not a failure. */
    if (rc == OK && tokenizer_of_model(&in.tok, m, &in.tok_error) == OK)
        if (chat_of_model(&in.chat, m, in.tok, &in.chat_error) < 0) in.chat = NULL;
    if (rc == OK) rc = json ? print_json(&in, e) : print_info(&in, e);
    chat_close(&in.chat);
    tokenizer_close(&in.tok);
    model_close(&m);
    buf_free(&path);
    return rc;
}
