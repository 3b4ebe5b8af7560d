/* tokenizer_priv: what the tokenizer's files share. tokenizer.c owns the object, encodes and decodes;
 * tokenizer_bpe.c merges; tokenizer_build.c keeps the tables; tokenizer_json.c (over tokenizer_scan.c) and
 * tokenizer_vocab.c fill them. */
#ifndef HEARTH_TOKENIZER_PRIV_H
#define HEARTH_TOKENIZER_PRIV_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "tokenizer.h"

/* How adjacent symbols find what they merge into. */
enum merge_rule {
    MERGE_TABLE, /* pairs of ids with ranks (GPT-2 style merges) */
    MERGE_RANK,  /* concatenated bytes that are a token; its id is the rank (tiktoken, tekken) */
    MERGE_SCORE  /* concatenated bytes that are a token; the highest score first (SentencePiece) */
};

/* Where a space is put in front of a text before merging (SentencePiece's dummy prefix). */
enum space_prefix { PREFIX_NEVER, PREFIX_FIRST, PREFIX_ALWAYS }; /* FIRST: only where the whole text begins */

enum { MAX_SPLITS = 4 };

/* Bytes -> id, open addressing. */
struct token_map {
    int32_t *slot; /* [size] id or -1 */
    size_t size;   /* a power of two */
};

struct merge {
    uint64_t pair; /* left id << 32 | right id; UINT64_MAX: empty */
    int32_t rank, id;
};

struct added_token {
    struct span name;
    int32_t id;
    bool special, lstrip, rstrip;
};

struct tokenizer {
    struct arena arena;
    char kind[96];
    int32_t n;
    struct span *bytes;   /* [n] the token as merging sees it; empty where there is no such token */
    struct span *shown;   /* [n] what each id decodes to, where that differs (U+2581 is a space); else NULL */
    uint8_t *kinds;       /* [n] enum token_kind */
    float *scores;        /* [n], MERGE_SCORE */
    struct token_map map; /* over normal tokens, by their raw bytes */
    enum merge_rule rule;
    struct merge *merges; /* open addressing, [merges_size] */
    size_t merges_size;
    bool chars;       /* symbols begin as characters with byte tokens for those unknown; else as bytes */
    bool whole_first; /* a piece that is a token as a whole is emitted so (ignore_merges) */
    bool nfc, spaces; /* spaces: " " is written as U+2581 */
    enum space_prefix space_prefix;
    bool prefix_once; /* no prefix to a text that begins with a space */
    bool add_bos;
    int32_t bos, eos, unk;
    int32_t byte_id[256]; /* token of each byte, -1 where there is none */
    pcre2_code *split[MAX_SPLITS];
    struct span split_text[MAX_SPLITS]; /* each as it was given */
    int n_split;
    struct added_token *added; /* [n_added] by name once indexed */
    size_t n_added;
    bool added_first[256]; /* some added token begins with this byte */
};

/* -------------------------------------------------------------------------------- building (tokenizer_build.c) */

int tokenizer_new(struct tokenizer **out, int32_t n, struct err *e) MUST_CHECK;
/* A span of the arena with these bytes. */
int tokenizer_keep(struct tokenizer *t, struct span s, struct span *out, struct err *e) MUST_CHECK;
/* A token in the printable stand-in alphabet of byte-level BPE, as raw bytes. A character outside the alphabet is
 * kept as its own UTF-8 bytes (added tokens are written plainly). */
int tokenizer_keep_byte_level(struct tokenizer *t, struct span s, struct span *out, struct err *e) MUST_CHECK;
/* Index of the tokens that merging may give, and byte_id. Call once bytes and kinds are filled. Control tokens are
 * not among them: text alone never becomes one. */
int tokenizer_index(struct tokenizer *t, struct err *e) MUST_CHECK;
/* Fills shown for vocabularies that write a space as U+2581. */
int tokenizer_show_spaces(struct tokenizer *t, struct err *e) MUST_CHECK;
/* The byte of a token "<0xHH>", or -1. */
int tokenizer_hex_byte(struct span s);
int32_t token_map_find(const struct tokenizer *t, const char *p, size_t n);
int tokenizer_merges_reserve(struct tokenizer *t, size_t n, struct err *e) MUST_CHECK;
/* A merge given by its halves as the file writes them. Unknown halves or results: false. */
bool tokenizer_merge_add(struct tokenizer *t, struct span left, struct span right, int32_t rank);
const struct merge *tokenizer_merge_find(const struct tokenizer *t, int32_t left, int32_t right);
/* Sets split step k, the next or an old one; \s and \S are written out as Unicode's White_Space, which PCRE2's
 * differ from at U+180E. Refuses what regex engines read differently. */
int tokenizer_split_set(struct tokenizer *t, int k, struct span pattern, const char *what, struct err *e) MUST_CHECK;
/* The list of added tokens is complete: index it. */
void tokenizer_added_index(struct tokenizer *t);
/* The longest added token that [p, p+n) begins with, or NULL. */
const struct added_token *tokenizer_added_at(const struct tokenizer *t, const char *p, size_t n);

extern const char pattern_gpt2[], pattern_llama3[], pattern_qwen2[], pattern_o200k[], pattern_tekken[],
    pattern_digits[], pattern_words[]; /* each U+2581 begins a piece */

/* -------------------------------------------------------------------------------- large JSON (tokenizer_scan.c) */

/* A place in JSON text. The scan_* functions skip white space, return false on anything else than they look for,
 * and then leave the place somewhere before the fault. */
struct scan {
    const char *p, *end;
    struct arena *arena; /* strings with escapes are copied here */
    bool no_memory;      /* why a string could not be read */
};
bool scan_sign(struct scan *s, char c);
bool scan_string(struct scan *s, struct span *out); /* points into the text where nothing is escaped */
bool scan_int(struct scan *s, int64_t *out);        /* whole, not negative, at most 18 digits */
bool scan_skip(struct scan *s);                     /* one value of any kind, not validated */
/* The values of these members of an object, empty where absent. Not validated. */
void json_find(struct span object, const char *const *keys, struct span *values, size_t n);
/* Appends json with each of the parts, which lie in it, replaced by null. OK or ERR_NOMEM. */
int json_without(struct buf *out, struct span json, const struct span *parts, size_t n) MUST_CHECK;

/* -------------------------------------------------------------------------------- merging (tokenizer_bpe.c) */

/* Scratch of one encode call. */
struct bpe {
    struct symbol *sym;
    size_t sym_cap;
    struct bigram *heap;
    size_t heap_len, heap_cap;
    unsigned char lost; /* the first byte of the symbol without a token that made bpe_encode return ERR_INPUT */
};
void bpe_free(struct bpe *b);
/* Appends the ids of one piece: OK, ERR_NOMEM or ERR_INPUT. */
int bpe_encode(const struct tokenizer *t, struct bpe *b, struct span piece, struct ids *out) MUST_CHECK;

#endif
