/* fuzz_config: any bytes as config.json, generation_config.json and hf_quant_config.json. */
#include "model_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct span text = {(const char *)data, size};
    struct arena a = {0};
    struct hf_config c;
    struct err e;
    int rc = hf_config_parse(&c, text, "fuzz", &a, &e);
    if (rc == OK) rc = hf_generation_parse(&c.c, text, "fuzz", &e);
    if (rc == OK) rc = hf_quant_parse(&c.scheme, text, "fuzz", &e);
    arena_free(&a);
    return 0;
}
