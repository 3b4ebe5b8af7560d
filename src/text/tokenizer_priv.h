/* tokenizer_priv: what the tokenizer's files share. tokenizer.c owns the object, encodes and decodes; tokenizer_bpe.c
 * merges; tokenizer_json.c and tokenizer_vocab.c fill the object from files. */
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
    struct span *bytes; /* [n] the token as merging sees it; empty where there is no such token */
    struct span *shown; /* [n] what each id decodes to, where that differs (U+2581 is a space); else NULL */
    uint8_t *kinds;     /* [n] enum token_kind */
    float *scores;      /* [n], MERGE_SCORE */
    struct token_map map; /* over normal tokens, by their raw bytes */
    enum merge_rule rule;
    struct merge *merges; /* open addressing, [merges_size] */
    size_t merges_size;
    bool chars;         /* symbols begin as characters with byte tokens for those unknown; else as bytes */
    bool whole_first;   /* a piece that is a token as a whole is emitted so (ignore_merges) */
    bool nfc, spaces;   /* spaces: " " is written as U+2581, one is put in front where space_prefix */
    bool space_prefix;
    bool add_bos;
    int32_t bos, eos, unk;
    int32_t byte_id[256]; /* token of each byte, -1 where there is none */
    pcre2_code *split[MAX_SPLITS];
    int n_split;
    struct added_token *added;
    size_t n_added;
    struct token_map added_map; /* name -> index in added */
    uint8_t *added_first;       /* [256] some added token begins with this byte */
    int32_t *added_lengths;     /* distinct lengths, longest first */
    int n_added_lengths;
};

/* ------------------------------------------------------------------------------------------------ building (tokenizer_build.c) */

int tokenizer_new(struct tokenizer **out, int32_t n, struct err *e) MUST_CHECK;
/* A span of the arena with these bytes. */
int tokenizer_keep(struct tokenizer *t, struct span s, struct span *out, struct err *e) MUST_CHECK;
/* A token in the printable stand-in alphabet of byte-level BPE, as raw bytes. A character outside the alphabet is kept as
 * its own UTF-8 bytes (added tokens are written plainly). */
int tokenizer_keep_byte_level(struct tokenizer *t, struct span s, struct span *out, struct err *e) MUST_CHECK;
/* Index of all tokens of kind normal and byte; then byte_id. Call once bytes and kinds are filled. */
int tokenizer_index(struct tokenizer *t, struct err *e) MUST_CHECK;
/* Fills shown for vocabularies that write a space as U+2581. */
int tokenizer_show_spaces(struct tokenizer *t, struct err *e) MUST_CHECK;
/* The byte of a token "<0xHH>", or -1. */
int tokenizer_hex_byte(struct span s);
int32_t token_map_find(const struct tokenizer *t, const char *p, size_t n);
int tokenizer_merges_reserve(struct tokenizer *t, size_t n, struct err *e) MUST_CHECK;
/* A merge given by the raw bytes of its halves. Unknown halves or results: false. */
bool tokenizer_merge_add(struct tokenizer *t, struct span left, struct span right, int32_t rank);
const struct merge *tokenizer_merge_find(const struct tokenizer *t, int32_t left, int32_t right);
/* Adds a split step; \s and \S are written out as Unicode's White_Space, which PCRE2's differ from at U+180E. */
int tokenizer_split_add(struct tokenizer *t, struct span pattern, const char *what, struct err *e) MUST_CHECK;
/* The added token of exactly this name, or NULL. */
const struct added_token *tokenizer_added_find(const struct tokenizer *t, const char *p, size_t n);
/* The list of added tokens is complete: index it. */
int tokenizer_added_index(struct tokenizer *t, struct err *e) MUST_CHECK;

extern const char pattern_gpt2[], pattern_llama3[], pattern_qwen2[], pattern_o200k[], pattern_tekken[], pattern_digits[];

/* ------------------------------------------------------------------------------------------------ merging (tokenizer_bpe.c) */

/* Scratch of one encode call. */
struct bpe {
    struct symbol *sym;
    size_t sym_cap;
    struct bigram *heap;
    size_t heap_len, heap_cap;
};
void bpe_free(struct bpe *b);
/* Appends the ids of one piece. */
int bpe_encode(const struct tokenizer *t, struct bpe *b, struct span piece, struct ids *out) MUST_CHECK;

#endif
