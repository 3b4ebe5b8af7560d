/* fuzz_gguf: any bytes as a GGUF file: header, vocabulary, search table, configuration. */
#include "model_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct model m = {.container = "gguf"};
    struct gguf g;
    struct err e;
    int rc = gguf_parse(&g, &m.tensors, data, size, "fuzz", &m.arena, &e);
    if (rc == OK) rc = tensors_index(&m.tensors, &e);
    if (rc == OK) rc = gguf_vocab(&m.vocab, &g, &m.arena, &e);
    if (rc == OK) rc = gguf_config(&m, &g, &e);
    volatile uint8_t sink = 0;
    for (size_t i = 0; i < m.tensors.n && rc == OK; i++)
        if (m.tensors.items[i].bytes) sink = m.tensors.items[i].data[m.tensors.items[i].bytes - 1];
    (void)sink;
    tensors_free(&m.tensors);
    arena_free(&m.arena);
    return 0;
}
