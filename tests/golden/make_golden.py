#!/usr/bin/env python3
"""Writes tiny seeded checkpoints of every family and format, with the logits that transformers computes for them.

Usage: make_golden.py [--out DIR] [--only CASE,...]      (needs requirements.txt of this folder)

Each case is a folder: the checkpoint (a directory, or model*.gguf), logits.npy (float32 [T, V], a forward pass of the
fixed ids), and expect.json. For a quantised checkpoint the reference is the model that holds exactly the dequantised
weights, in float32, so what a test measures is the error of the arithmetic, not that of the quantisation. Weights are
loaded into a model that was made in float32: one that was ever cast keeps rounded RoPE frequencies. Attention and
experts run in their plain ("eager") form.
"""
import argparse
import json
import pathlib
import shutil

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

T = 64          # ids of the fixed prompt: longer than the sliding window and the original context of the RoPE scalings
GREEDY = 12     # ids of the greedy continuation
V = 256

# ---------------------------------------------------------------------------------------------------- families

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=96, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, head_dim=16, intermediate_size=96, vocab_size=V, max_position_embeddings=512, rms_norm_eps=1e-5,
             rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
             bos_token_id=1, eos_token_id=2)
WIDE = dict(LLAMA, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=256)
LLAMA3 = dict(LLAMA, rope_theta=500000.0, head_dim=32, num_attention_heads=3, num_key_value_heads=1,
              rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                original_max_position_embeddings=32))
SMOLLM2 = dict(LLAMA, hidden_size=144, num_attention_heads=9, num_key_value_heads=3, rope_theta=100000.0, tie_word_embeddings=True)
MISTRAL = dict(LLAMA, model_type="mistral", architectures=["MistralForCausalLM"], hidden_size=80, num_attention_heads=4, head_dim=32,
               rope_theta=1000000.0, sliding_window=None)
QWEN2 = dict(LLAMA, model_type="qwen2", architectures=["Qwen2ForCausalLM"], rms_norm_eps=1e-6, use_sliding_window=False)
QWEN3 = dict(LLAMA, model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=24, rms_norm_eps=1e-6, use_sliding_window=False)
QWEN3_MOE = dict(QWEN3, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=8, num_experts_per_tok=2,
                 moe_intermediate_size=32, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
GPT_OSS = dict(model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_size=96, num_hidden_layers=4, num_attention_heads=4,
               num_key_value_heads=2, head_dim=32, intermediate_size=64, vocab_size=V, max_position_embeddings=512, rms_norm_eps=1e-5,
               rope_theta=150000.0, attention_bias=True, num_local_experts=8, num_experts_per_tok=4, experts_per_token=4,
               sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2, swiglu_limit=7.0, hidden_act="silu",
               rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=32,
                                 truncate=False), tie_word_embeddings=False, eos_token_id=2)


def hf_model(config):
    """A float32 model of the family, weights not yet set."""
    kind = CONFIG_MAPPING[config["model_type"]]
    model = AutoModelForCausalLM.from_config(kind(**config), attn_implementation="eager", experts_implementation="eager")
    return model.float().eval()


def draw(name, shape, rng, tied=False):
    """Weights that keep activations and logits lively: attention that is not flat, routers with clear choices."""
    if name.endswith("norm.weight") or "layernorm" in name:
        return (1 + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    if name.endswith("bias") or name.endswith("sinks"):
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)
    if "embed" in name:
        return ((0.2 if tied else 1.0) * rng.standard_normal(shape)).astype(np.float32)
    gain = 2.0 if "router" in name or name.endswith("mlp.gate.weight") or "lm_head" in name else 1.0
    if "o_proj" in name or "down_proj" in name:
        gain = 0.5  # layers add to the stream without drowning it, as in a trained model
    fan_in = shape[-1]
    return (gain / np.sqrt(fan_in) * rng.standard_normal(shape)).astype(np.float32)


def published(config, seed):
    """Name -> float32 array under the names and in the layouts that checkpoints are published with."""
    model, rng, out = hf_model(config), np.random.default_rng(seed), {}
    D, F = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    for name, p in model.state_dict().items():
        shape = tuple(p.shape)
        if config["model_type"] == "qwen3_moe" and name.endswith("experts.gate_up_proj"):
            for x in range(shape[0]):
                for part in ("gate_proj", "up_proj"):
                    key = name.replace("gate_up_proj", f"{x}.{part}.weight")
                    out[key] = draw(key, (F, D), rng)
        elif config["model_type"] == "qwen3_moe" and name.endswith("experts.down_proj"):
            for x in range(shape[0]):
                key = name.replace("down_proj", f"{x}.down_proj.weight")
                out[key] = draw(key, (D, F), rng)
        elif config["model_type"] == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            out[name] = draw(name, (shape[0], shape[2], shape[1]), rng)  # [E, out, in]; rows of gate_up interleave gate, up
        elif name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        else:
            out[name] = draw(name, shape, rng, config["tie_word_embeddings"])
    return out


def reference(config, weights):
    """A model that holds these published weights."""
    model, state = hf_model(config), {}
    for name, p in model.state_dict().items():
        if config["model_type"] == "qwen3_moe" and name.endswith("experts.gate_up_proj"):
            both = [np.concatenate([weights[name.replace("gate_up_proj", f"{x}.{part}.weight")] for part in ("gate_proj", "up_proj")])
                    for x in range(p.shape[0])]
            value = np.stack(both)
        elif config["model_type"] == "qwen3_moe" and name.endswith("experts.down_proj"):
            value = np.stack([weights[name.replace("down_proj", f"{x}.down_proj.weight")] for x in range(p.shape[0])])
        elif config["model_type"] == "gpt_oss" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            value = weights[name].transpose(0, 2, 1)
        elif name == "lm_head.weight" and config["tie_word_embeddings"]:
            value = weights["model.embed_tokens.weight"]
        else:
            value = weights[name]
        assert tuple(value.shape) == tuple(p.shape), (name, value.shape, p.shape)
        state[name] = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))
    model.load_state_dict(state, strict=True)
    return model


# ---------------------------------------------------------------------------------------------------- number formats

def to_bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(h):
    return (h.astype(np.uint32) << 16).view(np.float32)


E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def to_e4m3(x):
    return torch.from_numpy(np.clip(x, -448, 448)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def to_e2m1(x):
    """Nearest code, ties to the even code."""
    mag = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for edge, strict in ((.25, False), (.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (mag >= edge) if strict else (mag > edge)
    return code | (np.signbit(x) << 3).astype(np.uint8)


def fp8(w, rows, cols, bf16_scale=False):
    """E4M3 codes, the scale grid with one scale for rows x cols elements, and the dequantised matrix."""
    n, k = w.shape
    grid = np.zeros((-(-n // rows), -(-k // cols)), np.float32)
    codes, back = np.zeros(w.shape, np.uint8), np.zeros(w.shape, np.float32)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = np.s_[i * rows:(i + 1) * rows, j * cols:(j + 1) * cols]
            s = np.float32(np.abs(w[at]).max() / 448)
            if bf16_scale:
                s = from_bf16(to_bf16(np.array([s])))[0]
            grid[i, j] = s
            codes[at] = to_e4m3(w[at] / s)
            back[at] = E4M3[codes[at]] * s
    return codes, grid, back


def nvfp4(w):
    """Packed codes [n, k/2], E4M3 scales [n, k/16], the global scale, and the dequantised matrix."""
    n, k = w.shape
    total = np.float32(np.abs(w).max() / (6 * 448))
    blocks = w.reshape(n, k // 16, 16)
    scales = to_e4m3(np.abs(blocks).max(-1) / 6 / total)
    scales = np.maximum(scales, 1)
    step = E4M3[scales] * total
    codes = to_e2m1(blocks / step[..., None]).reshape(n, k)
    back = E2M1[codes].reshape(n, k // 16, 16) * step[..., None]
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales, total, back.reshape(n, k).astype(np.float32)


def mxfp4(w):
    """Codes [.., k], E8M0 scales [.., k/32], and the dequantised array."""
    blocks = w.reshape(*w.shape[:-1], w.shape[-1] // 32, 32)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    codes = to_e2m1(blocks / np.exp2(exponent)[..., None])
    back = E2M1[codes] * np.exp2(exponent)[..., None]
    return codes.reshape(w.shape), (exponent + 127).astype(np.uint8), back.reshape(w.shape).astype(np.float32)


# ---------------------------------------------------------------------------------------------------- safetensors cases

class Raw:
    """Bytes with a dtype that numpy does not name."""
    def __init__(self, dtype, array):
        self.dtype, self.array = dtype, array


def write_safetensors(path, tensors):
    header, at, blobs = {}, 0, []
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(np.uint8): "U8"}
    for name, t in tensors.items():
        dtype, array = (t.dtype, t.array) if isinstance(t, Raw) else (names[t.dtype], t)
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def bf16(x):
    return Raw("BF16", to_bf16(x))


PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")


def quantise_projections(weights, one):
    """Applies one(name, w) -> (tensors, dequantised) to each projection; the rest becomes BF16."""
    stored, back = {}, {}
    for name, w in weights.items():
        if name.endswith(PROJECTIONS):
            tensors, back[name] = one(name[:-len(".weight")], w)
            stored.update(tensors)
        else:
            stored[name] = bf16(w)
            back[name] = from_bf16(to_bf16(w))
    return stored, back


def plain(weights, dtype):
    if dtype == "F32":
        return dict(weights), weights
    if dtype == "F16":
        half = {n: w.astype(np.float16) for n, w in weights.items()}
        return half, {n: w.astype(np.float32) for n, w in half.items()}
    return {n: bf16(w) for n, w in weights.items()}, {n: from_bf16(to_bf16(w)) for n, w in weights.items()}


def fp8_modelopt(name, w):
    codes, grid, back = fp8(w, *w.shape)
    return {f"{name}.weight": Raw("F8_E4M3", codes), f"{name}.weight_scale": grid.reshape(()),
            f"{name}.input_scale": np.array(0.01, np.float32)}, back


def fp8_ct_tensor(name, w):
    codes, grid, back = fp8(w, *w.shape, bf16_scale=True)
    return {f"{name}.weight": Raw("F8_E4M3", codes), f"{name}.weight_scale": Raw("BF16", to_bf16(grid.reshape(1))),
            f"{name}.input_scale": Raw("BF16", to_bf16(np.array([0.01], np.float32)))}, back


def fp8_ct_channel(name, w):
    codes, grid, back = fp8(w, 1, w.shape[1])
    return {f"{name}.weight": Raw("F8_E4M3", codes), f"{name}.weight_scale": grid}, back


def fp8_block(name, w):
    codes, grid, back = fp8(w, 128, 128, bf16_scale=True)
    return {f"{name}.weight": Raw("F8_E4M3", codes), f"{name}.weight_scale_inv": Raw("BF16", to_bf16(grid))}, back


def nvfp4_modelopt(name, w):
    packed, scales, total, back = nvfp4(w)
    return {f"{name}.weight": packed, f"{name}.weight_scale": Raw("F8_E4M3", scales), f"{name}.weight_scale_2": total.reshape(()),
            f"{name}.input_scale": np.array(0.01, np.float32)}, back


def nvfp4_ct(name, w):
    packed, scales, total, _ = nvfp4(w)
    reciprocal = np.float32(1) / total
    step = E4M3[scales] * (np.float32(1) / reciprocal)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(w.shape)
    back = (E2M1[codes].reshape(w.shape[0], -1, 16) * step[..., None]).reshape(w.shape).astype(np.float32)
    return {f"{name}.weight_packed": packed, f"{name}.weight_scale": Raw("F8_E4M3", scales),
            f"{name}.weight_global_scale": reciprocal.reshape(1), f"{name}.input_global_scale": np.array([100], np.float32)}, back


CT = dict(quant_method="compressed-tensors", quantization_status="compressed", ignore=["lm_head"], kv_cache_scheme=None)
CT_FP8 = lambda strategy, act: dict(CT, format="float-quantized", config_groups=dict(group_0=dict(
    targets=["Linear"], weights=dict(num_bits=8, type="float", symmetric=True, dynamic=False, strategy=strategy), input_activations=act)))
CT_NVFP4 = dict(CT, format="nvfp4-pack-quantized", config_groups=dict(group_0=dict(
    targets=["Linear"], weights=dict(num_bits=4, type="float", symmetric=True, dynamic=False, strategy="tensor_group", group_size=16),
    input_activations=dict(num_bits=4, type="float", dynamic="local", strategy="tensor_group", group_size=16))))
FP8_BLOCK = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])


def gpt_oss_mxfp4(weights):
    stored, back = {}, {}
    for name, w in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            codes, scales, back[name] = mxfp4(w)
            stored[name + "_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(*scales.shape, 16)
            stored[name + "_scales"] = scales
        else:
            stored[name] = bf16(w)
            back[name] = from_bf16(to_bf16(w))
    return stored, back


def new_spelling(config):
    """config.json as transformers 5 writes it."""
    c = dict(config)
    rope = dict(c.pop("rope_scaling", None) or {"rope_type": "default"})
    rope["rope_theta"] = c.pop("rope_theta")
    c["rope_parameters"] = rope
    c["dtype"] = "bfloat16"
    if "num_experts" in c:
        c["num_local_experts"] = c.pop("num_experts")
    return c


def old_spelling(config):
    return dict(config, torch_dtype="bfloat16")


def hf_case(config, store, seed=1, spelling=old_spelling, extra=None, side=None, shards=1, decorate=None):
    def make(folder):
        stored, back = store(published(config, seed))
        written = spelling(config)
        if extra:
            written["quantization_config"] = extra
        if decorate:
            stored, written = decorate(folder, stored, written)
        (folder / "config.json").write_text(json.dumps(written, indent=1))
        if side:
            (folder / "hf_quant_config.json").write_text(json.dumps(side, indent=1))
        if shards == 1:
            write_safetensors(folder / "model.safetensors", stored)
        else:
            names, index = list(stored), {}
            for i in range(shards):
                file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
                part = {n: stored[n] for n in names[i::shards]}
                write_safetensors(folder / file, part)
                index.update({n: file for n in part})
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": index}, indent=1))
        return ".", config, back
    return make


def as_mistral3(folder, stored, config):
    """The text tower inside a vision model: names behind a prefix, vision tensors to skip, a second copy to ignore."""
    text = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    outer = dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3", text_config=text,
                 vision_config=dict(model_type="pixtral", hidden_size=32), image_token_index=10, spatial_merge_size=2, torch_dtype="bfloat16")
    named = {"language_model." + n: t for n, t in stored.items()}
    named["vision_tower.patch_conv.weight"] = bf16(np.ones((4, 3, 2, 2), np.float32))
    named["multi_modal_projector.linear_1.weight"] = bf16(np.ones((8, 8), np.float32))
    write_safetensors(folder / "consolidated.safetensors", {"tok_embeddings.weight": bf16(np.zeros((V, 4), np.float32))})
    return named, outer


def with_text(folder, stored, config):
    """A tokenizer of single bytes and a few merges, a template, and a generation_config.json."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {b: chr(b) for b in printable}
    chars.update({b: chr(256 + i) for i, b in enumerate(x for x in range(256) if x not in printable)})
    vocab = {c: 3 + i for i, (b, c) in enumerate(sorted(chars.items())) if 3 + i < V - 4}
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"]]
    for i, m in enumerate(merges):
        vocab["".join(m)] = V - 4 + i
    added = [dict(id=i, content=c, special=True, normalized=False, lstrip=False, rstrip=False, single_word=False)
             for i, c in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))]
    tokenizer = dict(version="1.0", added_tokens=added, normalizer=None,
                     pre_tokenizer=dict(type="ByteLevel", add_prefix_space=False, use_regex=True), post_processor=None,
                     decoder=dict(type="ByteLevel"), model=dict(type="BPE", vocab=vocab, merges=merges))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        bos_token="<|im_start|>", eos_token="<|im_end|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")))
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[2, 0], temperature=0.2, top_p=0.9)))
    return stored, config


# ---------------------------------------------------------------------------------------------------- GGUF cases

GG = gguf.GGMLQuantizationType


def random_blocks(kind, shape, rng, std):
    """Random valid blocks of a K-quant with this deviation: any bytes are a weight, only the scales must be sane."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    def put(at, value):
        raw[..., at:at + 2] = np.full(raw.shape[:-1], value, np.float16)[..., None].view(np.uint8)
    if kind == GG.Q6_K:
        put(208, 1.0)
    else:
        centre = 15.5 if kind == GG.Q5_K else 7.5
        put(0, 1.0)
        put(2, centre)
    flat = raw.reshape(shape[0], -1)
    unit = std / gguf.quants.dequantize(flat, kind).std()
    put(208 if kind == GG.Q6_K else 0, unit)
    if kind != GG.Q6_K:
        put(2, unit * centre)
    return raw.reshape(shape[0], -1)


def encode(kind, w, rng):
    """Stored bytes and what they mean."""
    if kind == GG.F32:
        return w, w
    if kind in (GG.Q4_K, GG.Q5_K, GG.Q6_K):
        raw = random_blocks(kind, w.shape, rng, w.std())
        return raw, gguf.quants.dequantize(raw, kind)
    if kind == GG.MXFP4:
        codes, scales, back = mxfp4(w)
        blocks = codes.reshape(*scales.shape, 32)
        raw = np.concatenate([scales[..., None], blocks[..., :16] | blocks[..., 16:] << 4], -1)
        return raw.reshape(*w.shape[:-1], -1), back
    raw = gguf.quants.quantize(w, kind)
    return raw, gguf.quants.dequantize(raw, kind)


def permute(w, heads):
    """GGUF's row order of q and k in arch llama: pairs (i, i + d/2) become neighbours."""
    d = w.shape[0] // heads
    return w.reshape(heads, 2, d // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, heads):
    d = w.shape[0] // heads
    return w.reshape(heads, d // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


GGUF_NAMES = {
    "input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight", "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight", "mlp.router.weight": "ffn_gate_inp.weight", "mlp.router.bias": "ffn_gate_inp.bias",
    **{f"self_attn.{p}_proj.{s}": f"attn_{'output' if p == 'o' else p}.{s}" for p in "qkvo" for s in ("weight", "bias")},
    **{f"mlp.{p}_proj.weight": f"ffn_{p}.weight" for p in ("gate", "up", "down")},
}


def gguf_tensors(config, weights, kind_of, arch, rng):
    """[(name, array, kind)] and the dequantised published weights."""
    out, back = [], {}
    H, Hk = config["num_attention_heads"], config["num_key_value_heads"]

    def add(name, w, key, permuted=0):
        kind = GG.F32 if w.ndim == 1 or "norm" in name or "ffn_gate_inp" in name else kind_of(name)
        raw, value = encode(kind, permute(w, permuted) if permuted else w, rng)
        out.append((name, raw, kind))
        back[key] = unpermute(value, permuted) if permuted else value

    experts = {}
    for key, w in weights.items():
        if key == "model.embed_tokens.weight":
            add("token_embd.weight", w, key)
        elif key == "model.norm.weight":
            add("output_norm.weight", w, key)
        elif key == "lm_head.weight":
            add("output.weight", w, key)
        else:
            _, _, layer, rest = key.split(".", 3)
            if ".experts." in key:
                experts.setdefault((layer, rest.split(".")[-2] if arch == "qwen3moe" else rest.split(".")[-1]), []).append((key, w))
                continue
            name = GGUF_NAMES[rest]
            if arch == "gpt-oss" and name == "ffn_norm.weight":
                name = "post_attention_norm.weight"
            part = rest.split(".")[1]
            heads = {"q_proj": H, "k_proj": Hk}.get(part, 0) if arch in ("llama", "mistral3") else 0
            add(f"blk.{layer}.{name}", w, key, heads)
    for (layer, part), found in experts.items():
        if arch == "qwen3moe":
            name = f"blk.{layer}.ffn_{part.split('_')[0]}_exps.weight"
            coded = [encode(kind_of(name), w, rng) for _, w in found]
            out.append((name, np.stack([raw for raw, _ in coded]), kind_of(name)))
            back.update({key: value for (key, _), (_, value) in zip(found, coded)})
            continue
        key, w = found[0]  # gpt-oss: one stack, gate and up rows interleaved in the published form
        bias = part.endswith("_bias")
        name = part.removesuffix("_bias")
        suffix, kind = (".bias", GG.F32) if bias else (".weight", kind_of("ffn_exps"))
        if name == "down_proj":
            raw, back[key] = encode(kind, w, rng)
            out.append((f"blk.{layer}.ffn_down_exps{suffix}", raw, kind))
        else:
            back[key] = np.empty_like(w)
            for i, half in enumerate(("gate", "up")):
                raw, value = encode(kind, np.ascontiguousarray(w[:, i::2]), rng)
                out.append((f"blk.{layer}.ffn_{half}_exps{suffix}", raw, kind))
                back[key][:, i::2] = value
    return out, back


def write_gguf(path, arch, config, tensors, split=0, rope_freqs=None):
    w = gguf.GGUFWriter(str(path), arch, split_max_tensors=split)
    moe = "moe_intermediate_size" in config or arch == "gpt-oss"
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_rope_dimension_count(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(config["rope_theta"])
    w.add_vocab_size(V)
    if moe:
        w.add_expert_count(config.get("num_experts", config.get("num_local_experts")))
        w.add_expert_used_count(config["num_experts_per_tok"])
        w.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if arch == "gpt-oss":
        w.add_sliding_window(config["sliding_window"])
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(config["rope_scaling"]["factor"])
        w.add_rope_scaling_orig_ctx_len(config["rope_scaling"]["original_max_position_embeddings"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([f"t{i}" for i in range(V)])
    w.add_token_types([1] * V)
    w.add_token_merges([])
    w.add_eos_token_id(2)
    if rope_freqs is not None:
        w.add_tensor("rope_freqs.weight", rope_freqs)
    for name, raw, kind in tensors:
        w.add_tensor(name, raw, raw_dtype=kind if kind != GG.F32 else None)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def gguf_case(arch, config, kind_of, seed=2, split=0, file="model.gguf"):
    if not callable(kind_of):
        fixed = kind_of
        kind_of = lambda name: fixed

    def make(folder):
        rng = np.random.default_rng(seed + 100)
        tensors, back = gguf_tensors(config, published(config, seed), kind_of, arch, rng)
        freqs = None
        if config.get("rope_scaling", {}).get("rope_type") == "llama3":
            s = config["rope_scaling"]
            inv = config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
            length, orig = 2 * np.pi / inv, s["original_max_position_embeddings"]
            blend = (orig / length - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
            divided = np.where(length < orig / s["high_freq_factor"], 1.0,
                               np.where(length > orig / s["low_freq_factor"], s["factor"], 1 / ((1 - blend) / s["factor"] + blend)))
            freqs = divided.astype(np.float32)
        write_gguf(folder / file, arch, config, tensors, split, freqs)
        made = sorted(p.name for p in folder.glob("*.gguf"))
        return made[0], config, back
    return make


def k_mix(name):
    """As Q4_K_M mixes: v and down finer, embedding and head finest."""
    if "token_embd" in name or name.startswith("output"):
        return GG.Q6_K
    return GG.Q6_K if "attn_v" in name else GG.Q5_K if "ffn_down" in name else GG.Q4_K


def oss_kind(name):
    return GG.MXFP4 if "exps" in name else GG.Q8_0


QWEN3_FP8 = dict(QWEN3, hidden_size=144, intermediate_size=200)
MOE_FP8 = dict(QWEN3_MOE, hidden_size=160, num_experts=4, moe_intermediate_size=192)

CASES = {
    "llama-f32": hf_case(LLAMA, lambda w: plain(w, "F32"), spelling=new_spelling),
    "llama-f16": hf_case(LLAMA, lambda w: plain(w, "F16")),
    "llama-bf16": hf_case(LLAMA, lambda w: plain(w, "BF16"), shards=3),
    "llama3-rope-bf16": hf_case(LLAMA3, lambda w: plain(w, "BF16")),
    "llama3-rope-new-bf16": hf_case(LLAMA3, lambda w: plain(w, "BF16"), spelling=new_spelling),
    "smollm2-bf16": hf_case(SMOLLM2, lambda w: plain(w, "BF16"), decorate=with_text),
    "mistral-bf16": hf_case(MISTRAL, lambda w: plain(w, "BF16")),
    "mistral3-bf16": hf_case(MISTRAL, lambda w: plain(w, "BF16"), decorate=as_mistral3),
    "qwen2-bf16": hf_case(QWEN2, lambda w: plain(w, "BF16")),
    "qwen3-bf16": hf_case(QWEN3, lambda w: plain(w, "BF16"), spelling=new_spelling),
    "qwen3moe-bf16": hf_case(QWEN3_MOE, lambda w: plain(w, "BF16")),
    "qwen3moe-new-bf16": hf_case(QWEN3_MOE, lambda w: plain(w, "BF16"), spelling=new_spelling),
    "gptoss-mxfp4": hf_case(GPT_OSS, gpt_oss_mxfp4, extra=dict(quant_method="mxfp4")),
    "gptoss-new-mxfp4": hf_case(GPT_OSS, gpt_oss_mxfp4, spelling=new_spelling, extra=dict(quant_method="mxfp4"), seed=5),
    "llama-fp8-modelopt": hf_case(LLAMA, lambda w: quantise_projections(w, fp8_modelopt), side=dict(
        producer=dict(name="modelopt", version="0.23"), quantization=dict(quant_algo="FP8", kv_cache_quant_algo=None, exclude_modules=["lm_head"]))),
    "llama-fp8-ct-tensor": hf_case(LLAMA, lambda w: quantise_projections(w, fp8_ct_tensor),
                                   extra=CT_FP8("tensor", dict(num_bits=8, type="float", dynamic=False, strategy="tensor"))),
    "llama-fp8-ct-channel": hf_case(LLAMA, lambda w: quantise_projections(w, fp8_ct_channel),
                                    extra=CT_FP8("channel", dict(num_bits=8, type="float", dynamic=True, strategy="token"))),
    "qwen3-fp8-block": hf_case(QWEN3_FP8, lambda w: quantise_projections(w, fp8_block), extra=FP8_BLOCK),
    "qwen3moe-fp8-block": hf_case(MOE_FP8, lambda w: quantise_projections(w, fp8_block), extra=FP8_BLOCK),
    "llama-nvfp4-modelopt": hf_case(LLAMA, lambda w: quantise_projections(w, nvfp4_modelopt), side=dict(
        producer=dict(name="modelopt", version="0.29"),
        quantization=dict(quant_algo="NVFP4", group_size=16, kv_cache_quant_algo="FP8", exclude_modules=["lm_head"]))),
    "llama-nvfp4-ct": hf_case(LLAMA, lambda w: quantise_projections(w, nvfp4_ct), extra=CT_NVFP4),
    "gguf-llama-f32": gguf_case("llama", LLAMA, GG.F32),
    "gguf-llama-f16": gguf_case("llama", LLAMA, GG.F16),
    "gguf-llama-bf16": gguf_case("llama", LLAMA, GG.BF16),
    "gguf-llama-q8_0": gguf_case("llama", LLAMA, GG.Q8_0),
    "gguf-llama-q4_0": gguf_case("llama", LLAMA, GG.Q4_0),
    "gguf-llama-q4_1": gguf_case("llama", LLAMA, GG.Q4_1),
    "gguf-llama-q5_0": gguf_case("llama", LLAMA, GG.Q5_0),
    "gguf-llama-q5_1": gguf_case("llama", LLAMA, GG.Q5_1),
    "gguf-llama-q4_k": gguf_case("llama", WIDE, GG.Q4_K),
    "gguf-llama-q5_k": gguf_case("llama", WIDE, GG.Q5_K),
    "gguf-llama-q6_k": gguf_case("llama", WIDE, GG.Q6_K),
    "gguf-llama-q4_k_mix": gguf_case("llama", WIDE, k_mix),
    "gguf-llama3-rope-f16": gguf_case("llama", LLAMA3, GG.F16),
    "gguf-llama-split-q8_0": gguf_case("llama", LLAMA, GG.Q8_0, split=12),
    "gguf-mistral3-q8_0": gguf_case("mistral3", dict(MISTRAL, hidden_size=64), GG.Q8_0),
    "gguf-qwen2-q8_0": gguf_case("qwen2", QWEN2, GG.Q8_0),
    "gguf-qwen3-q8_0": gguf_case("qwen3", dict(QWEN3, head_dim=32), GG.Q8_0),
    # a seed whose routers leave margins that int8 activations do not cross
    "gguf-qwen3moe-q8_0": gguf_case("qwen3moe", dict(QWEN3_MOE, head_dim=32), GG.Q8_0, seed=5),
    "gguf-gptoss-mxfp4": gguf_case("gpt-oss", GPT_OSS, oss_kind),
}


# ---------------------------------------------------------------------------------------------------- references

def run(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def make_case(name, out):
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file, config, back = CASES[name](folder)
    model = reference(config, back)
    ids = np.random.default_rng(11).integers(3, V - 6, T).tolist()
    logits = run(model, ids)
    greedy, margins, seq = [], [], list(ids)
    for _ in range(GREEDY):
        last = np.sort(run(model, seq)[-1])
        token = int(run(model, seq)[-1].argmax())
        greedy.append(token)
        margins.append(float(last[-1] - last[-2]))
        seq.append(token)
    np.save(folder / "logits.npy", logits.astype(np.float32))
    (folder / "expect.json").write_text(json.dumps(dict(model=file, ids=ids, greedy=greedy, margins=margins)))
    size = sum(p.stat().st_size for p in folder.iterdir())
    print(f"{name:24} {size / 1e6:6.2f} MB  logits std {logits.std():.2f}  smallest margin {min(margins):.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("--only", default=None)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    for name in args.only.split(",") if args.only else CASES:
        make_case(name, args.out)


if __name__ == "__main__":
    main()
