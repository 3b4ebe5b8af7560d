/* cmd_run.c: hearth run: answers one prompt, or chats. A chat is kept as messages in OpenAI's shape and rendered anew
 * for each turn; the engine finds what it has computed before by itself. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "cli.h"

/* Not given: NAN, or -1 for whole numbers. */
struct run_opts {
    const char *prompt, *system, *cpu, *device;
    int64_t n, ctx, threads, seed, top_k;
    double temp, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    struct flag_list bias;
    bool raw, json;
};

struct run {
    struct run_opts o;
    const char *name;
    double started;
    struct model *model;
    struct tokenizer *tok;
    struct chat *chat; /* NULL: raw */
    struct engine *en;
    struct sampling sampling;
    struct logit_bias bias[FLAG_LIST_MAX];
    int max_new;
};

/* ------------------------------------------------------------------------------------------------ sampling */

static int parse_bias(struct run *r, struct err *e)
{
    for (int i = 0; i < r->o.bias.n; i++) {
        const char *text = r->o.bias.items[i], *colon = strchr(text, ':');
        char id_text[24];
        int64_t id;
        double value;
        if (!colon || (size_t)(colon - text) >= sizeof id_text)
            return err_set(e, ERR_INPUT, "--logit-bias '%s' is not of the form ID:VALUE", text);
        snprintf(id_text, sizeof id_text, "%.*s", (int)(colon - text), text);
        TRY(parse_int("the id of --logit-bias", id_text, 0, INT32_MAX, &id, e));
        TRY(parse_number("the value of --logit-bias", colon + 1, -100, 100, &value, e));
        r->bias[i] = (struct logit_bias){(int32_t)id, (float)value};
    }
    r->sampling.bias = r->bias;
    r->sampling.n_bias = r->o.bias.n;
    return OK;
}

/* The flag, else the checkpoint's advice, else `rest`. */
static float choose(double flag, float advice, float rest)
{
    return !isnan(flag) ? (float)flag : advice >= 0 ? advice : rest;
}

/* Where the checkpoint advises anything, what it leaves out is off; where it is silent, llama.cpp's defaults hold. */
static void choose_sampling(struct run *r)
{
    const struct sampling_defaults *d = &model_config(r->model)->sampling;
    const struct run_opts *o = &r->o;
    bool silent = d->temperature < 0 && d->top_p < 0 && d->min_p < 0 && d->top_k < 0;
    struct sampling *s = &r->sampling;
    s->temperature = choose(o->temp, d->temperature, silent ? 0.8f : 1);
    s->top_p = choose(o->top_p, d->top_p, silent ? 0.95f : 1);
    s->min_p = choose(o->min_p, d->min_p, silent ? 0.05f : 0);
    s->top_k = (int32_t)(o->top_k >= 0 ? o->top_k : d->top_k >= 0 ? d->top_k : silent ? 40 : 0);
    s->repetition_penalty = choose(o->repeat_penalty, d->repetition_penalty, 1);
    s->presence_penalty = (float)o->presence_penalty;
    s->frequency_penalty = (float)o->frequency_penalty;
    s->seed = (uint64_t)o->seed;
}

static int64_t random_seed(void)
{
    uint32_t seed;
    if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed) seed = (uint32_t)time(NULL);
    return seed;
}

/* ------------------------------------------------------------------------------------------------ prompts */

static json_t *message(const char *role, struct span content)
{
    return json_pack("{s:s, s:s%}", "role", role, "content", content.ptr ? content.ptr : "", content.len);
}

/* Appends a message; text that is no UTF-8 cannot be one. */
static int add_message(json_t *messages, const char *role, struct span content, struct err *e)
{
    if (!utf8_valid(content)) return err_set(e, ERR_INPUT, "the %s text is not valid UTF-8", role);
    if (json_array_append_new(messages, message(role, content)) < 0)
        return err_set(e, ERR_NOMEM, "out of memory for a message");
    return OK;
}

static int start_messages(const struct run *r, json_t **out, struct err *e)
{
    json_t *messages = json_array();
    if (!messages) return err_set(e, ERR_NOMEM, "out of memory for messages");
    if (r->o.system && add_message(messages, "system", span_of(r->o.system), e) < 0) {
        json_decref(messages);
        return e->code;
    }
    *out = messages;
    return OK;
}

static int encode_chat(const struct run *r, const json_t *messages, struct ids *out, struct err *e)
{
    return chat_encode(r->chat, r->tok, messages, NULL, NULL, true, (int64_t)time(NULL), out, e);
}

/* ------------------------------------------------------------------------------------------------ opening */

static int open_text(struct run *r, const char *model, struct err *e)
{
    struct buf path = {0};
    int rc = resolve_model(&path, model, e);
    if (rc == OK) rc = model_open(&r->model, path.data, e);
    if (rc == OK) rc = tokenizer_of_model(&r->tok, r->model, e);
    if (rc == OK && !r->o.raw) rc = chat_of_model(&r->chat, r->model, r->tok, e);
    buf_free(&path);
    TRY(rc);
    r->name = model_name(r->model);
    choose_sampling(r);
    if (r->o.raw || r->chat) return OK;
    if (r->o.system) return err_set(e, ERR_INPUT, "--system needs a chat template, and %s has none", r->name);
    fprintf(stderr, "hearth: note: %s has no chat template: the text is continued as it is, as with --raw\n",
            r->name);
    r->o.raw = true;
    return OK;
}

static int open_engine(struct run *r, struct err *e)
{
    struct engine_opts eo = {.backend = {.device = r->o.device, .threads = (int)r->o.threads,
                                         .cpu_level = r->o.cpu},
                             .ctx = (int)r->o.ctx,
                             .max_seqs = 1};
    return engine_open(&r->en, r->model, &eo, e);
}

static void run_close(struct run *r)
{
    engine_close(&r->en);
    chat_close(&r->chat);
    tokenizer_close(&r->tok);
    model_close(&r->model);
}

/* ------------------------------------------------------------------------------------------------ one prompt */

static json_t *json_ids(const struct ids *ids)
{
    json_t *a = json_array();
    for (size_t i = 0; i < ids->len; i++) json_array_append_new(a, json_integer(ids->id[i]));
    return a;
}

static json_t *json_text(const struct buf *b) { return json_stringn(b->data ? b->data : "", b->len); }

static json_t *json_sampling(const struct sampling *s)
{
    return json_pack("{s:f, s:i, s:f, s:f, s:f, s:f, s:f, s:I}", "temperature", (double)s->temperature, "top_k",
                     (int)s->top_k, "top_p", (double)s->top_p, "min_p", (double)s->min_p, "repeat_penalty",
                     (double)s->repetition_penalty, "presence_penalty", (double)s->presence_penalty,
                     "frequency_penalty", (double)s->frequency_penalty, "seed", (json_int_t)s->seed);
}

static json_t *json_answer(const struct run *r, const struct ids *prompt, const struct answer *a)
{
    json_t *o = json_pack("{s:s, s:i, s:i, s:i, s:o, s:o, s:o, s:s}", "model", r->name, "prompt_tokens",
                          (int)a->prompt_tokens, "cached_tokens", (int)a->cached_tokens, "new_tokens",
                          (int)a->ids.len, "prompt_ids", json_ids(prompt), "ids", json_ids(&a->ids), "text",
                          json_text(&a->text), "finish_reason", finish_name(a->finish));
    json_t *measured =
        json_pack("{s:f, s:f, s:f, s:f, s:s, s:i, s:o}", "prefill_tok_s", a->prefill_tok_s, "decode_tok_s",
                  a->decode_tok_s, "time_to_first_token_s", a->first_token_s, "start_to_first_token_s",
                  a->ids.len ? a->first_token_at - r->started : 0.0, "device", engine_device(r->en), "context",
                  engine_ctx(r->en), "sampling", json_sampling(&r->sampling));
    int rc = json_object_update(o, measured);
    if (a->thinking.len) rc |= json_object_set_new(o, "thinking", json_text(&a->thinking));
    json_decref(measured);
    if (rc == 0) return o;
    json_decref(o);
    return NULL;
}

static int print_json(const struct run *r, const struct ids *prompt, const struct answer *a, struct err *e)
{
    return out_json(json_answer(r, prompt, a), JSON_COMPACT, e);
}

static int encode_prompt(const struct run *r, struct span text, struct ids *out, struct err *e)
{
    json_t *messages;
    if (r->o.raw) return tokenizer_encode(r->tok, text, NULL, 0, true, out, e);
    TRY(start_messages(r, &messages, e));
    int rc = add_message(messages, "user", text, e);
    if (rc == OK) rc = encode_chat(r, messages, out, e);
    json_decref(messages);
    return rc;
}

/* Answers text by itself. */
static int answer_once(struct run *r, struct span text, struct err *e)
{
    struct ids prompt = {0};
    struct answer a = {0};
    int rc = text.len ? OK : err_set(e, ERR_INPUT, "the prompt is empty");
    if (rc == OK) rc = encode_prompt(r, text, &prompt, e);
    if (rc == OK && !r->en) rc = open_engine(r, e);
    if (rc == OK) rc = answer_run(&a, r->en, r->tok, &prompt, r->max_new, &r->sampling, !r->o.raw, !r->o.json, e);
    if (rc == OK && r->o.json) rc = print_json(r, &prompt, &a, e);
    else if (rc == OK) answer_print_speed(&a);
    if (rc == OK && a.finish == FINISH_CANCELLED && r->o.prompt) rc = err_set(e, ERR_CANCELLED, "interrupted");
    answer_free(&a);
    ids_free(&prompt);
    return rc;
}

static int run_prompt(struct run *r, struct err *e)
{
    struct buf piped = {0};
    struct span text = span_of(r->o.prompt);
    int rc = OK;
    if (span_is(text, "-")) {
        rc = read_stdin(&piped, e);
        text = buf_span(&piped);
    }
    interrupt_catch(true);
    if (rc == OK) rc = answer_once(r, text, e);
    buf_free(&piped);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ chat */

/* One turn: on success the question and the answer stand in messages, on failure neither does. */
static int chat_turn(struct run *r, json_t *messages, struct span text, struct err *e)
{
    size_t before = json_array_size(messages);
    struct ids prompt = {0};
    struct answer a = {0};
    int rc = add_message(messages, "user", text, e);
    if (rc == OK) rc = encode_chat(r, messages, &prompt, e);
    if (rc == OK) rc = answer_run(&a, r->en, r->tok, &prompt, r->max_new, &r->sampling, true, true, e);
    if (rc == OK) rc = add_message(messages, "assistant", buf_span(&a.text), e);
    if (rc == OK) answer_print_speed(&a);
    while (rc < 0 && json_array_size(messages) > before) json_array_remove(messages, json_array_size(messages) - 1);
    answer_free(&a);
    ids_free(&prompt);
    return rc;
}

/* A person can mend a bad line and go on; in a pipe the first failure ends the run. */
static int run_lines(struct run *r, struct line_reader *lines, json_t *messages, struct err *e)
{
    struct span line;
    for (;;) {
        int rc = line_read(lines, &line, e);
        if (rc <= 0) return rc;
        if (!line.len) continue;
        rc = r->o.raw ? answer_once(r, line, e) : chat_turn(r, messages, line, e);
        if (rc == OK) continue;
        if (rc != ERR_INPUT || !line_editing(lines)) return rc;
        fprintf(stderr, "hearth: %s\n", e->msg);
    }
}

static int run_chat(struct run *r, struct err *e)
{
    struct line_reader *lines = NULL;
    json_t *messages = NULL;
    int rc = start_messages(r, &messages, e);
    if (rc == OK) rc = open_engine(r, e);
    if (rc == OK) rc = line_open(&lines, e);
    if (rc == OK) {
        interrupt_catch(false);
        if (line_editing(lines))
            fprintf(stderr, "%s on %s, context %d. Ctrl-C stops an answer, Ctrl-D ends the chat.\n", r->name,
                    engine_device(r->en), engine_ctx(r->en));
        rc = run_lines(r, lines, messages, e);
    }
    line_close(&lines);
    json_decref(messages);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ the verb */

static const char notes[] =
    "Without -p it is a chat: each line is a prompt, and a backslash at its end goes on in the next line. Ctrl-C\n"
    "stops the answer, Ctrl-D ends the chat. With standard input from a pipe, each line of it is a prompt.\n"
    "The prompt is put into the model's chat template, and nothing in it can act as a control token. With --raw it\n"
    "is continued as it is, and control tokens written in it count.\n"
    "Sampling follows what the checkpoint advises; one that says nothing gets temperature 0.8, top-k 40, top-p 0.95\n"
    "and min-p 0.05. Temperature 0 always takes the most likely token.\n";
static const char examples[] = "  hearth run SmolLM2-135M-Instruct.Q4_1.gguf -p \"What is a hearth?\"\n"
                               "  hearth run Qwen/Qwen3-0.6B                       # a chat\n"
                               "  hearth run model.gguf --raw -p \"Once upon a time\" -n 64 --temp 0\n"
                               "  git diff | hearth run model.gguf --system \"Summarise the change.\" -p - --json\n";

static int parse(struct run *r, int argc, char **argv, const char **model, struct err *e)
{
    struct run_opts *o = &r->o;
    const struct flag flags[] = {
        {"prompt", 'p', FLAG_TEXT, &o->prompt, 0, 0, "TEXT",
         "answer this prompt and end; - reads it from standard input"},
        {"max-tokens", 'n', FLAG_INT, &o->n, 1, INT32_MAX, "N",
         "tokens to produce at most (default: as the context allows)"},
        {"system", 's', FLAG_TEXT, &o->system, 0, 0, "TEXT", "the system message"},
        {"temp", 0, FLAG_NUMBER, &o->temp, 0, 100, "T", "temperature; 0 is greedy"},
        {"top-p", 0, FLAG_NUMBER, &o->top_p, 0, 1, "P", "draw from the likeliest tokens that sum to P; 1 is all"},
        {"top-k", 0, FLAG_INT, &o->top_k, 0, INT32_MAX, "K", "draw from the K likeliest tokens; 0 is all"},
        {"min-p", 0, FLAG_NUMBER, &o->min_p, 0, 1, "P",
         "drop tokens less likely than P times the likeliest; 0 is none"},
        {"seed", 0, FLAG_INT, &o->seed, 0, 9007199254740991, "S",
         "seed of the drawing (default: a new one each time)"},
        {"repeat-penalty", 0, FLAG_NUMBER, &o->repeat_penalty, 0, 100, "R",
         "divide what was said before by R; 1 is none"},
        {"presence-penalty", 0, FLAG_NUMBER, &o->presence_penalty, -100, 100, "X",
         "subtract X from what the answer has said"},
        {"frequency-penalty", 0, FLAG_NUMBER, &o->frequency_penalty, -100, 100, "X",
         "subtract X each time it was said"},
        {"logit-bias", 0, FLAG_LIST, &o->bias, 0, 0, "ID:VALUE", "add VALUE to a token's logit; may be repeated"},
        {"raw", 0, FLAG_SWITCH, &o->raw, 0, 0, NULL, "no chat template: continue the text as it is"},
        {"ctx", 'c', FLAG_INT, &o->ctx, 1, MAX_CTX, "N", "context in tokens (default: the model's, at most 8192)"},
        FLAG_THREADS(&o->threads),
        FLAG_CPU(&o->cpu),
        FLAG_DEVICE(&o->device),
        {"json", 0, FLAG_SWITCH, &o->json, 0, 0, NULL, "print one JSON object with text, ids and speeds (needs -p)"},
    };
    const struct usage u = {"run", "Answers a prompt, or chats.", "MODEL", flags, COUNT_OF(flags), notes, examples};
    int rc = flags_parse(&u, argc, argv, model, e);
    if (rc) return rc;
    if (o->json && !o->prompt)
        return err_set(e, ERR_INPUT, "--json needs a prompt: add -p TEXT, or -p - for standard input");
    if (o->raw && o->system) return err_set(e, ERR_INPUT, "--system has no place with --raw: put it into the text");
    if (o->prompt && !*o->prompt) return err_set(e, ERR_INPUT, "the prompt is empty: --prompt ''");
    return parse_bias(r, e);
}

int cmd_run(int argc, char **argv, struct err *e)
{
    struct run r = {.started = clock_now(),
                    .o = {.n = -1,
                          .seed = random_seed(),
                          .top_k = -1,
                          .device = DEVICE_DEFAULT,
                          .temp = NAN,
                          .top_p = NAN,
                          .min_p = NAN,
                          .repeat_penalty = NAN}};
    const char *model;
    int rc = parse(&r, argc, argv, &model, e);
    if (rc) return rc < 0 ? rc : OK;
    r.max_new = (int)(r.o.n < 0 ? INT32_MAX : r.o.n);
    rc = open_text(&r, model, e);
    if (rc == OK) rc = r.o.prompt ? run_prompt(&r, e) : run_chat(&r, e);
    run_close(&r);
    return rc;
}
