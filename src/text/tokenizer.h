/* tokenizer: text to token ids and back, for byte-level BPE (GPT-2, Llama 3, Qwen, gpt-oss, SmolLM2, Mistral's
 * tekken) and SentencePiece-style BPE (Llama 2). Sources: tokenizer.json, tekken.json, or the vocabulary inside a
 * GGUF file.
 *
 * The caller holds one object, `struct tokenizer`: immutable after it was opened, so any number of threads may
 * encode and decode with it at once. Streaming decode has its own small state, `struct detok`.
 *
 * Refused, with the name of what was met: other model types (Unigram, WordPiece), pre-tokenizers, normalizers and
 * decoders that none of the supported families use. */
#ifndef HEARTH_TOKENIZER_H
#define HEARTH_TOKENIZER_H

#include "base.h"

struct tokenizer;

enum token_kind { TOKEN_NORMAL, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER_DEFINED, TOKEN_UNUSED, TOKEN_BYTE };

/* A vocabulary as a GGUF file holds it. All pointers are borrowed for the call only. */
struct tokenizer_vocab {
    struct span model; /* tokenizer.ggml.model: "gpt2" or "llama" */
    struct span pre;   /* tokenizer.ggml.pre: "llama-bpe", "qwen2", "gpt-4o", "tekken", "smollm", "gpt-2", ... */
    const struct span *tokens; /* [n_tokens] */
    const int32_t *types;      /* [n_tokens], GGUF's 1..6, or NULL: all normal */
    const float *scores;       /* [n_tokens] or NULL (SentencePiece needs them) */
    size_t n_tokens;
    const struct span *merges; /* [n_merges] "a b" */
    size_t n_merges;
    int64_t bos, eos, unk;         /* ids, -1 where absent */
    int add_bos, add_space_prefix; /* 1, 0, or -1 where absent (the model's default) */
};

/* Each *_parse is a pure function over bytes; `what` names the source in messages. On success the caller owns
 * *out. */
int tokenizer_from_json(struct tokenizer **out, struct span json, const char *what, struct err *e) MUST_CHECK;
int tokenizer_from_tekken(struct tokenizer **out, struct span json, const char *what, struct err *e) MUST_CHECK;
int tokenizer_from_vocab(struct tokenizer **out, const struct tokenizer_vocab *v, const char *what,
                         struct err *e) MUST_CHECK;
/* The tokenizer of a checkpoint directory: tokenizer.json, else tekken.json. With both, and model_type mistral or
 * mistral3, tekken.json wins (Mistral Small 3.1's tokenizer.json carries a wrong split pattern); with tokenizer.json
 * alone and that very pattern, the tekken pattern is used in its place, with a warning in the log. Also reads
 * tokenizer_config.json for add_bos_token and bos_token. */
int tokenizer_from_dir(struct tokenizer **out, const char *dir, const char *model_type, struct err *e) MUST_CHECK;
void tokenizer_close(struct tokenizer **t);

/* Bytes [begin, end) of a text that came from the user: inside them nothing is matched as a control token. */
struct mark {
    size_t begin, end;
};

struct ids {
    int32_t *id;
    size_t len, cap;
};
int ids_push(struct ids *v, int32_t id) MUST_CHECK; /* OK or ERR_NOMEM */
void ids_free(struct ids *v);

/* Appends the ids of text to out. Control and added tokens are matched in the text, longest first, except where a
 * match would touch a byte inside one of the n_marks marks (ascending, disjoint); everything between two matched
 * tokens is tokenised as one text, whatever its marks. With add_bos, the BOS id is put first where the model wants
 * one (tokenizer_adds_bos). Invalid UTF-8 is an error that names the byte's offset: nothing is replaced in
 * silence. */
int tokenizer_encode(const struct tokenizer *t, struct span text, const struct mark *marks, size_t n_marks,
                     bool add_bos, struct ids *out, struct err *e) MUST_CHECK;

int32_t tokenizer_size(const struct tokenizer *t); /* ids run from 0 to size - 1 */
int32_t tokenizer_bos(const struct tokenizer *t);  /* -1 where there is none */
int32_t tokenizer_eos(const struct tokenizer *t);  /* -1 where none is declared here */
bool tokenizer_adds_bos(const struct tokenizer *t);
const char *tokenizer_kind(const struct tokenizer *t); /* "byte-level BPE (qwen2)", for people */
enum token_kind tokenizer_token_kind(const struct tokenizer *t, int32_t id); /* TOKEN_UNUSED for ids out of range */
/* The bytes that id decodes to (a control token: its name). Borrowed from t; empty for unused ids and out of
 * range. */
struct span tokenizer_bytes(const struct tokenizer *t, int32_t id);
/* The id of exactly this added or control token; -1 where there is none. */
int32_t tokenizer_find_special(const struct tokenizer *t, struct span name);

/* Streaming decode: feeds ids one by one and hands out complete UTF-8 only. All-zero is a valid start (first text of
 * a sequence: a SentencePiece tokenizer drops one leading space there). */
struct detok {
    char held[4];
    int n_held;
    bool begun;
};
/* Appends to out the text that became complete with id. Control tokens give nothing unless `control` is set. */
int detok_push(struct detok *d, const struct tokenizer *t, int32_t id, bool control, struct buf *out) MUST_CHECK;
/* End of the stream: bytes still held become U+FFFD. */
int detok_end(struct detok *d, struct buf *out) MUST_CHECK;

#endif
