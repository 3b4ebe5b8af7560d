/* fuzz_safetensors: any bytes as a safetensors file; every tensor that is accepted lies in it. */
#include "model_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct arena a = {0};
    struct tensors t = {0};
    struct err e;
    int rc = safetensors_parse(&t, data, size, "fuzz", &a, &e);
    volatile uint8_t sink = 0;
    for (size_t i = 0; i < t.n && rc == OK; i++)
        if (t.items[i].bytes) sink = t.items[i].data[t.items[i].bytes - 1];
    (void)sink;
    tensors_free(&t);
    arena_free(&a);
    return 0;
}
