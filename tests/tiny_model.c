/* tiny_model.c: the writer behind tiny_model.h. */
#include "tiny_model.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { D = 64, H = 4, HK = 2, DH = 16, F = 96 };

static void *must(void *p, const char *what)
{
    if (p) return p;
    perror(what);
    exit(1);
}

static float noise(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 40) / (double)(1 << 24) - 0.5);
}

struct writer {
    char *header;
    size_t len, at; /* header bytes, data bytes */
    float *data;
    uint64_t seed;
};

static void add(struct writer *w, const char *name, int rows, int cols, float scale, float offset)
{
    size_t n = (size_t)rows * (size_t)(cols ? cols : 1);
    char shape[48];
    snprintf(shape, sizeof shape, cols ? "%d,%d" : "%d", rows, cols);
    w->len += (size_t)sprintf(w->header + w->len, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}",
                              w->len > 1 ? "," : "", name, shape, w->at * 4, (w->at + n) * 4);
    for (size_t i = 0; i < n; i++) w->data[w->at + i] = offset + scale * noise(&w->seed);
    w->at += n;
}

static void add_layer(struct writer *w, int l, const char *name, int rows, int cols, float scale, float offset)
{
    char full[128];
    snprintf(full, sizeof full, "model.layers.%d.%s.weight", l, name);
    add(w, full, rows, cols, scale, offset);
}

void tiny_model_write(char dir[64])
{
    const char *tmp = getenv("TMPDIR");
    char path[128];
    snprintf(dir, 64, "%.40s/hearth-XXXXXX", tmp ? tmp : "/tmp");
    must(mkdtemp(dir), dir);

    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = must(fopen(path, "w"), path);
    fprintf(f,
            "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":%d,"
            "\"num_hidden_layers\":%d,\"num_attention_heads\":%d,\"num_key_value_heads\":%d,\"head_dim\":%d,"
            "\"intermediate_size\":%d,\"vocab_size\":%d,\"max_position_embeddings\":2048,\"rms_norm_eps\":1e-5,"
            "\"rope_theta\":10000.0,\"hidden_act\":\"silu\",\"tie_word_embeddings\":false,\"eos_token_id\":2}\n",
            D, TINY_LAYERS, H, HK, DH, F, TINY_VOCAB);
    fclose(f);

    struct writer w = {.header = must(calloc(1, 1 << 16), "header"), .data = must(calloc(1 << 20, 4), "data"), .seed = 7};
    w.len = (size_t)sprintf(w.header, "{");
    add(&w, "model.embed_tokens.weight", TINY_VOCAB, D, 2.0f, 0);
    for (int l = 0; l < TINY_LAYERS; l++) {
        add_layer(&w, l, "input_layernorm", D, 0, 0.5f, 1);
        add_layer(&w, l, "self_attn.q_proj", H * DH, D, 1.0f, 0);
        add_layer(&w, l, "self_attn.k_proj", HK * DH, D, 1.0f, 0);
        add_layer(&w, l, "self_attn.v_proj", HK * DH, D, 1.0f, 0);
        add_layer(&w, l, "self_attn.o_proj", D, H * DH, 1.0f, 0);
        add_layer(&w, l, "post_attention_layernorm", D, 0, 0.5f, 1);
        add_layer(&w, l, "mlp.gate_proj", F, D, 1.0f, 0);
        add_layer(&w, l, "mlp.up_proj", F, D, 1.0f, 0);
        add_layer(&w, l, "mlp.down_proj", D, F, 1.0f, 0);
    }
    add(&w, "model.norm.weight", D, 0, 0.5f, 1);
    add(&w, "lm_head.weight", TINY_VOCAB, D, 1.0f, 0);
    w.len += (size_t)sprintf(w.header + w.len, "}");

    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    f = must(fopen(path, "wb"), path);
    uint64_t n = w.len;
    fwrite(&n, 8, 1, f);
    fwrite(w.header, 1, w.len, f);
    fwrite(w.data, 4, w.at, f);
    fclose(f);
    free(w.header);
    free(w.data);
}

void tiny_model_remove(const char *dir)
{
    char path[128];
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    rmdir(dir);
}
