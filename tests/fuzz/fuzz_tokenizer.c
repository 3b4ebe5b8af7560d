/* fuzz_tokenizer: any bytes as a tokenizer.json and as a tekken.json; what opens encodes a few texts and decodes
 * them. */
#include "tokenizer.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const struct tokenizer *t)
{
    static const char *const texts[] = {"", "Hello world's <think>\n\n 123 <|im_end|>",
                                        "a\xCC\x81\xE4\xB8\xAD\xF0\x9F\x98\x80 aaaa", "  x"};
    struct err e;
    for (size_t i = 0; i < COUNT_OF(texts); i++) {
        struct span text = span_of(texts[i]);
        struct mark mark = {text.len / 3, text.len / 2};
        struct ids ids = {0};
        struct detok d = {0};
        struct buf out = {0};
        int rc = tokenizer_encode(t, text, &mark, 1, true, &ids, &e);
        for (size_t k = 0; rc == OK && k < ids.len; k++) rc = detok_push(&d, t, ids.id[k], k % 2, &out);
        if (rc == OK && detok_end(&d, &out) == OK && !utf8_valid(buf_span(&out))) abort();
        ids_free(&ids);
        buf_free(&out);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct span bytes = {(const char *)data, size};
    struct tokenizer *t = NULL;
    struct err e;
    log_set_level(LOG_ERROR);
    if (tokenizer_from_json(&t, bytes, "fuzz", &e) == OK) use(t);
    tokenizer_close(&t);
    if (tokenizer_from_tekken(&t, bytes, "fuzz", &e) == OK) use(t);
    tokenizer_close(&t);
    return 0;
}
