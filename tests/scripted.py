"""A checkpoint that says what a test wants: its attention and FFN are zero, its embedding is one-hot, and its head maps each
token to the one that shall follow. So every answer is known without a reference.

The vocabulary: ids 0..255 are the bytes, then the names in NAMES."""
import json
import struct

import numpy as np

CONTROL = ["<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
WORDS = ["assistant", "analysis", "final"]
NAMES = CONTROL + WORDS
D = 320
ID = {name: 256 + i for i, name in enumerate(NAMES)}
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def ids_of(text):
    """The ids of a text in which no name occurs."""
    return list(text.encode())


def byte_names():
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, extra = {}, 256
    for b in range(256):
        if b in plain:
            names[b] = chr(b)
        else:
            names[b] = chr(extra)
            extra += 1
    return names


def write_safetensors(path, tensors):
    """tensors: {name: array, or a shape alone: zeros that take no place on the disk}."""
    header, offset = {}, 0
    for name, t in tensors.items():
        shape = t if isinstance(t, tuple) else t.shape
        end = offset + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, t in tensors.items():
            f.seek(8 + len(text) + header[name]["data_offsets"][0])
            if not isinstance(t, tuple):
                f.write(np.ascontiguousarray(t, dtype="<f4").tobytes())
        f.truncate(8 + len(text) + offset)


def write(directory, follows, template=CHATML, bos=None, ctx=100000, stop="<|im_end|>", generation=None,
          vocab_size=D):
    """follows: {id: id that comes next}; all else is followed by itself. A vocab_size beyond D makes a large model of zeros."""
    directory.mkdir(parents=True, exist_ok=True)
    layers, heads, ffn = 1, 2, 32
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": D, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": 1, "intermediate_size": ffn, "vocab_size": vocab_size,
              "max_position_embeddings": ctx, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
              "eos_token_id": ID[stop], "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    if generation:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    head = np.zeros((D, D), np.float32)
    for i in range(D):
        head[follows.get(i, i), i] = 1
    tensors = {"model.embed_tokens.weight": np.eye(D), "lm_head.weight": head, "model.norm.weight": np.ones(D)}
    if vocab_size > D:
        tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"] = (vocab_size, D)
    for name, shape in {"input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (D, D),
                        "self_attn.k_proj": (D // heads, D), "self_attn.v_proj": (D // heads, D), "self_attn.o_proj": (D, D),
                        "mlp.gate_proj": (ffn, D), "mlp.up_proj": (ffn, D), "mlp.down_proj": (D, ffn)}.items():
        tensors[f"model.layers.0.{name}.weight"] = np.ones(shape) if len(shape) == 1 else np.zeros(shape)
    write_safetensors(directory / "model.safetensors", tensors)

    vocab = {name: b for b, name in byte_names().items()}
    added = [{"id": ID[n], "content": n, "special": n in CONTROL, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for n in NAMES]
    tokenizer = {"version": "1.0", "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                 "post_processor": None, "decoder": {"type": "ByteLevel"},
                 "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": stop, "add_bos_token": bos is not None}
    if bos:
        settings["bos_token"] = bos
    if template:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def script(*ids):
    """{a: b, b: c, ...}: each id is followed by the next one."""
    return dict(zip(ids, ids[1:]))
