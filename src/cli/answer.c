/* answer.c: drives the engine through one request, decodes its ids as they come, and measures.
 *
 * gpt-oss answers in channels:
 *     <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
 * Its control tokens carry no text of their own, so the channels are told apart here: `final`, and what stands in no
 * channel, is what was said; the rest is thinking, shown under its channel's name. No text is ever dropped. */
#include <math.h>
#include <string.h>

#include "cli.h"

struct channels {
    int32_t channel, message, end, start; /* ids; channel is -1 where the model has none */
    enum { IN_HEADER, IN_FINAL, IN_OTHER } at;
    struct buf name;
    bool naming; /* between channel and message */
};

struct speaker {
    struct answer *a;
    const struct tokenizer *tok;
    struct channels ch;
    struct detok detok;
    struct buf piece;
    bool show, any;
    char last; /* last byte shown */
};

void answer_free(struct answer *a)
{
    ids_free(&a->ids);
    buf_free(&a->text);
    buf_free(&a->thinking);
}

const char *finish_name(enum finish f)
{
    static const char *const names[] = {[FINISH_STOP] = "stop",
                                        [FINISH_LENGTH] = "length",
                                        [FINISH_CANCELLED] = "cancelled",
                                        [FINISH_ERROR] = "error"};
    return names[f];
}

/* ------------------------------------------------------------------------------------------------ showing */

static int show(struct speaker *s, struct span text, struct err *e)
{
    if (!s->show || !text.len) return OK;
    s->last = text.ptr[text.len - 1];
    s->any = true;
    return out_text(text, e);
}

static int show_line_end(struct speaker *s, struct err *e)
{
    return s->any && s->last == '\n' ? OK : show(s, span_of("\n"), e);
}

static void channels_open(struct channels *c, const struct tokenizer *t, bool chat)
{
    c->channel = chat ? tokenizer_find_special(t, span_of("<|channel|>")) : -1;
    c->message = tokenizer_find_special(t, span_of("<|message|>"));
    c->start = tokenizer_find_special(t, span_of("<|start|>"));
    c->end = tokenizer_find_special(t, span_of("<|end|>"));
    if (c->message < 0 || c->start < 0 || c->end < 0) c->channel = -1;
    c->at = IN_FINAL;
}

/* A message begins: its channel's name was collected. */
static int channel_enter(struct speaker *s, struct err *e)
{
    struct channels *c = &s->ch;
    size_t len = c->name.len ? strcspn(c->name.data, " \n\t") : 0;
    bool final = !len || (len == 5 && !strncmp(c->name.data, "final", 5));
    c->naming = false;
    c->at = final ? IN_FINAL : IN_OTHER;
    if (final && !s->any) return OK;
    if (s->any) {
        TRY(show_line_end(s, e));
        TRY(show(s, span_of("\n"), e));
    }
    TRY(show(s, span_of("["), e));
    TRY(show(s, final ? span_of("final") : (struct span){c->name.data, len}, e));
    return show(s, span_of("] "), e);
}

static int take_text(struct speaker *s, struct err *e)
{
    struct channels *c = &s->ch;
    int rc = OK;
    if (c->at == IN_HEADER) rc = c->naming ? buf_append(&c->name, s->piece.data, s->piece.len) : OK;
    else {
        struct buf *to = c->at == IN_FINAL ? &s->a->text : &s->a->thinking;
        rc = buf_append(to, s->piece.data, s->piece.len);
        if (rc == OK) rc = show(s, buf_span(&s->piece), e);
    }
    s->piece.len = 0;
    return rc;
}

static int take_id(struct speaker *s, int32_t id, struct err *e)
{
    struct channels *c = &s->ch;
    if (c->channel >= 0 && id == c->message) return channel_enter(s, e);
    if (c->channel >= 0 && (id == c->channel || id == c->start || id == c->end)) {
        c->at = id == c->end ? IN_FINAL : IN_HEADER;
        c->naming = id == c->channel;
        c->name.len = 0;
        return OK;
    }
    TRY(detok_push(&s->detok, s->tok, id, false, &s->piece));
    return s->piece.len ? take_text(s, e) : OK;
}

static int finish(struct speaker *s, struct err *e)
{
    TRY(detok_end(&s->detok, &s->piece));
    if (s->piece.len) TRY(take_text(s, e));
    if (s->ch.naming) { /* the answer ended inside a channel's name */
        s->ch.at = IN_FINAL;
        if (s->ch.name.len) TRY(buf_append(&s->piece, s->ch.name.data, s->ch.name.len));
        if (s->piece.len) TRY(take_text(s, e));
    }
    return show_line_end(s, e);
}

/* ------------------------------------------------------------------------------------------------ running */

static int find_stops(int32_t stops[MODEL_MAX_STOP + 1], const struct engine *en, const struct tokenizer *t)
{
    const struct model_config *c = engine_config(en);
    int n = c->n_stop;
    memcpy(stops, c->stop, (size_t)n * sizeof *stops);
    int32_t eos = tokenizer_eos(t);
    if (eos >= 0 && eos < c->n_vocab) stops[n++] = eos;
    return n;
}

/* Steps until the request is done. */
static int drive(struct speaker *s, struct engine *en, uint64_t id, struct err *e)
{
    struct answer *a = s->a;
    struct event ev;
    for (;;) {
        if (interrupt_taken()) engine_cancel(en, id);
        TRY(engine_step(en, e));
        while (engine_poll(en, &ev)) {
            if (ev.kind == EVENT_DONE) {
                a->finish = ev.finish;
                return OK;
            }
            if (!a->ids.len) a->first_token_at = clock_now();
            TRY(ids_push(&a->ids, ev.id));
            TRY(take_id(s, ev.id, e));
        }
    }
}

static void measure(struct answer *a, const struct engine_stats *was, const struct engine_stats *now, double started)
{
    double prefill = now->prefill_seconds - was->prefill_seconds, decode = now->decode_seconds - was->decode_seconds;
    size_t computed = (size_t)(now->prompt_tokens - was->prompt_tokens);
    a->cached_tokens = a->prompt_tokens > computed ? a->prompt_tokens - computed : 0;
    a->total_s = clock_now() - started;
    a->first_token_s = a->ids.len ? a->first_token_at - started : 0;
    a->prefill_tok_s = prefill > 0 ? (double)computed / prefill : 0;
    /* The first token comes out of the prompt's last step. */
    a->decode_tok_s = decode > 0 && a->ids.len > 1 ? (double)(a->ids.len - 1) / decode : 0;
}

int answer_run(struct answer *out, struct engine *en, const struct tokenizer *tok, const struct ids *prompt,
               int max_new, const struct sampling *sampling, bool chat, bool show_text, struct err *e)
{
    int32_t stops[MODEL_MAX_STOP + 1];
    struct answer a = {.prompt_tokens = prompt->len};
    struct speaker s = {.a = &a, .tok = tok, .show = show_text};
    struct request r = {
        .ids = prompt->id, .n_ids = prompt->len, .max_new = max_new, .stop = stops, .sampling = *sampling};
    struct engine_stats was = engine_stats(en), now;
    double started = clock_now();
    uint64_t id;
    r.n_stop = find_stops(stops, en, tok);
    channels_open(&s.ch, tok, chat);
    int rc = engine_submit(en, &r, &id, e);
    if (rc == OK) rc = drive(&s, en, id, e);
    if (rc == OK) rc = finish(&s, e);
    if (rc == OK && a.finish == FINISH_ERROR)
        rc = err_set(e, ERR_INPUT,
                     "the model's logits held no number after %zu tokens: its weights are damaged, or logit-bias "
                     "forbids everything",
                     a.ids.len);
    now = engine_stats(en);
    measure(&a, &was, &now, started);
    buf_free(&s.piece);
    buf_free(&s.ch.name);
    if (rc < 0) {
        answer_free(&a);
        return rc;
    }
    *out = a;
    return OK;
}

void answer_print_speed(const struct answer *a)
{
    char cached[48] = "";
    if (a->cached_tokens) snprintf(cached, sizeof cached, " (%zu of them known)", a->cached_tokens);
    fprintf(stderr, "[prompt %zu tokens%s, %.1f tok/s; answer %zu tokens, %.1f tok/s]\n", a->prompt_tokens, cached,
            a->prefill_tok_s, a->ids.len, a->decode_tok_s);
}
