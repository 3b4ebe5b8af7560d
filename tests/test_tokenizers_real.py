"""Real vocabularies, id for id against the reference libraries: tokenizers, tiktoken, sentencepiece. Each vocabulary
is written in the form in which checkpoints carry it (tokenizer.json, tekken.json, GGUF) and driven through
tool_tokenize. The texts: tests/data/tokenize.json, 2,500 seeded ones of everything that is awkward, and long runs.
fetch_vocab.py gets the vocabularies; those that are absent are skipped by name."""
import base64
import json
import os
import pathlib
import random
import re
import subprocess
import unicodedata

import pytest

import fetch_vocab
from conftest import HEARTH

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOL = [*HEARTH[:-1], str(pathlib.Path(HEARTH[-1]).parent / "tool_tokenize")]
CASES = json.loads((ROOT / "tests" / "data" / "tokenize.json").read_text())["cases"]

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
LLAMA3 = rf"(?i:{CONTRACTIONS})|{WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*" + TAIL
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (rf"{WORD}{UPPER}*{LOWER}+(?i:{CONTRACTIONS})?|{WORD}{UPPER}+{LOWER}*(?i:{CONTRACTIONS})?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + TAIL)
TEKKEN = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + TAIL

# ------------------------------------------------------------------------------------------------ texts

# Words of many scripts, decomposed characters, emoji with joiners, white space of every kind, digits, contractions,
# code, control characters: one JSON string a line.
PIECES = [json.loads(line) for line in (ROOT / "tests" / "data" / "tokenize_pieces.txt").read_text().splitlines()]
LETTERS = "aAbZéßжЖあ中ก𝒜ǅʰ\u0301"


def random_text(rng):
    kind = rng.random()
    if kind < 0.7:
        return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
    if kind < 0.8:
        return "".join(rng.choice(LETTERS + " '1\n.") for _ in range(rng.randint(1, 40)))
    if kind < 0.9:
        return rng.choice(PIECES) * rng.randint(2, 60)
    chars = []
    while len(chars) < 10:  # old characters only: the references and PCRE2 may know different newer ones
        c = chr(rng.randint(1, 0x323af))
        if unicodedata.category(c) not in ("Cn", "Cs") and unicodedata.ucd_3_2_0.category(c) != "Cn":
            chars.append(c)
    return "".join(chars)


def texts(specials):
    rng = random.Random(20240726)
    found = [case["text"] for case in CASES] + PIECES + [random_text(rng) for _ in range(2500)]
    mixed = specials + ["user\n", " ", "\n\n", "x", "<|", "é", "\u0338"]
    for _ in range(200 if specials else 0):
        found.append("".join(rng.choice(mixed) for _ in range(rng.randint(1, 6))))
    return found


RUNS = ["a", "A", " ", "\n", "7", "é", "中", "\u0301", "!", "aB", " a", "'s", "a ", "\t\n", "A1", "😀", "\r\n ",
        "e\u0301"]

# ------------------------------------------------------------------------------------------------ driving


def vocabulary(name):
    path = fetch_vocab.cache_dir() / name
    if not path.exists():
        pytest.skip(f"the vocabulary {name} is not in the cache: tests/fetch_vocab.py fetches it")
    return path


def drive(path, strings, *options):
    """[(ids, what they decode to)] of the strings, and the milliseconds for loading and encoding."""
    data = "".join(s + "\0" for s in strings).encode()
    done = subprocess.run([*TOOL, *options, path], input=data, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr.decode()
    results = []
    for line in done.stdout.decode().splitlines():
        ids, _, text = line.partition("\t")
        results.append(([int(i) for i in ids.split()], bytes.fromhex(text).decode()))
    assert len(results) == len(strings)
    load, encode = map(float, done.stderr.split()[-2:])
    return results, load, encode


def compare(path, strings, reference, *options, normal=lambda s: s, decode=None):
    """Every string's ids are the reference's, and decode to what the reference makes of them; without a `decode`, to
    the string but for what the normalizer changed."""
    results, load, encode = drive(path, strings, *options)
    wrong = []
    for s, (ids, back) in zip(strings, results):
        expected = reference(s)
        good = back == decode(ids) if decode else normal(back) == normal(s)
        if ids != expected or not good:
            wrong.append((s[:200], ids[:40], expected[:40], back[:200]))
    print(f"{path.name}: {len(strings)} strings, {len(wrong)} differ; load {load:.0f} ms, encode {encode:.0f} ms")
    assert not wrong, f"{len(wrong)} of {len(strings)}: {wrong[:3]}"


def compare_runs(path, reference, length=100_000, runs=RUNS):
    """Long runs without a place to cut: right ids, in a time that grows with the length only."""
    strings = [run * (length // len(run.encode())) for run in runs]
    results, _, encode = drive(path, strings)
    print(f"{path.name}: {len(strings)} runs of {length} bytes in {encode:.0f} ms")
    assert encode < length * len(runs) / 500, f"{encode:.0f} ms"
    for run, s, (ids, _) in zip(runs, strings, results):
        expected = reference(s)
        assert ids == expected, f"{run!r}: {len(ids)} ids, expected {len(expected)}"


# -------------------------------------------------------------------------------- writing vocabularies

STAND_IN = {}
for b in range(256):
    plain = 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b
    STAND_IN[b] = chr(b) if plain else chr(256 + sum(1 for v in STAND_IN.values() if ord(v) >= 256))


def written(token):
    return "".join(STAND_IN[b] for b in token)


def read_ranks(path):
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return ranks


def every_split(ranks):
    """Merges as transformers writes them for tiktoken vocabularies: every way to cut a token into two tokens."""
    merges = []
    for token in ranks:
        ways = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(*way, ranks[token]) for way in sorted(ways, key=lambda w: (ranks[w[0]], ranks[w[1]]))]
    return [m[:2] for m in sorted(merges, key=lambda m: m[2])]


def one_split(ranks):
    """Merges as the makers of Qwen and of GGUF files wrote them: the two parts that a token has when only earlier
    merges are done."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best, at = min((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
            if best >= rank:
                break
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(tuple(parts))
    return merges


def added_token(i, content, special=True):
    return {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": special}


def begin_with(bos, i):
    return {"type": "TemplateProcessing", "pair": [],
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [i], "tokens": [bos]}}}


def byte_level(use_regex):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def write_tokenizer(path, vocab, merges, added, *, normalizer=None, pre=None, post=None, decoder, **model):
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre, "post_processor": post, "decoder": decoder,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  **model, "vocab": vocab, "merges": merges}}, ensure_ascii=False))
    return path


def write_json(path, ranks, merges, pattern, specials, *, nfc=False, ignore_merges=False, arrays=True, bos=None,
               added=(), low=False):
    """A byte-level tokenizer.json. `low`: the special tokens have the first ids; they are in the vocabulary then."""
    pairs = [[written(a), written(b)] for a, b in merges]
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    post = [byte_level(True)] + ([begin_with(bos, specials[bos])] if bos else [])
    return write_tokenizer(
        path, (specials if low else {}) | {written(token): i for token, i in ranks.items()},
        pairs if arrays else [" ".join(p) for p in pairs],
        [added_token(i, name, name not in added) for name, i in specials.items()],
        normalizer={"type": "NFC"} if nfc else None,
        pre={"type": "Sequence", "pretokenizers": [split, byte_level(False)]},
        post={"type": "Sequence", "processors": post}, decoder=byte_level(True), ignore_merges=ignore_merges)


def tokenizers_of(path):
    tokenizers = pytest.importorskip("tokenizers")
    t = tokenizers.Tokenizer.from_file(str(path))
    return lambda s: t.encode(s, add_special_tokens=False).ids


def tiktoken_of(ranks, pattern, specials=None):
    tiktoken = pytest.importorskip("tiktoken")
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials or {})


def nfc(s):
    return unicodedata.normalize("NFC", s)


def write_gguf(path, model, pre, tokens, types, *, merges=None, scores=None, **extra):
    gguf = pytest.importorskip("gguf")
    w = gguf.GGUFWriter(str(path), "llama")
    w.add_tokenizer_model(model)
    if pre:
        w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(types)
    if merges is not None:
        w.add_token_merges(merges)
    if scores is not None:
        w.add_token_scores(scores)
    for key, value in extra.items():
        getattr(w, key)(value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    return path


def cut(specials, s):
    """The parts of s: (a special token of the list, True) or (text, False)."""
    parts, at = [], 0
    for m in re.finditer("|".join(re.escape(n) for n in sorted(specials, key=len, reverse=True)), s):
        parts += [(s[at:m.start()], False), (m.group(), True)]
        at = m.end()
    return [part for part in parts + [(s[at:], False)] if part[0]]


def ids_of(parts, specials, encode):
    return [i for part, special in parts for i in ([specials[part]] if special else encode(part))]


# ------------------------------------------------------------------------------------------------ byte-level families

LLAMA3_NAMES = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|eot_id|>", "<|python_tag|>",
]
QWEN_NAMES = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
]
HARMONY = {"startoftext": 199998, "endoftext": 199999, "return": 200002, "constrain": 200003, "channel": 200005,
           "start": 200006, "end": 200007, "message": 200008, "call": 200012, "endofprompt": 200018}
HARMONY = [f"<|{next((k for k, v in HARMONY.items() if v == i), f'reserved_{i}')}|>" for i in range(199998, 200019)]
FAMILIES = {
    "llama3": dict(file="llama3.tiktoken", pattern=LLAMA3, names=LLAMA3_NAMES, merges=every_split, ignore_merges=True,
                   arrays=False, bos="<|begin_of_text|>"),
    "qwen3": dict(file="qwen.tiktoken", pattern=QWEN, names=QWEN_NAMES, merges=one_split, nfc=True,
                  added=QWEN_NAMES[14:]),
    "gpt-oss": dict(file="o200k_base.tiktoken", pattern=O200K, names=HARMONY, merges=every_split, ignore_merges=True),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    how = dict(FAMILIES[request.param])
    ranks = read_ranks(vocabulary(how.pop("file")))
    names, merges, pattern = how.pop("names"), how.pop("merges"), how.pop("pattern")
    specials = {name: len(ranks) + i for i, name in enumerate(names)}
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    write_json(path, ranks, merges(ranks), pattern, specials, **how)
    return request.param, path, tiktoken_of(ranks, pattern, specials), nfc if how.get("nfc") else lambda s: s


def test_family_cases(family):
    name, path, _, _ = family
    results, load, _ = drive(path, [case["text"] for case in CASES])
    assert [ids for ids, _ in results] == [case[name] for case in CASES]
    assert load < 2000, f"loading took {load:.0f} ms"


def test_family_against_tokenizers(family):
    _, path, tik, normal = family
    compare(path, texts(sorted(tik.special_tokens_set)), tokenizers_of(path), normal=normal)


def test_family_against_tiktoken(family):
    _, path, tik, normal = family
    compare(path, texts([]), lambda s: tik.encode_ordinary(normal(s)), normal=normal)


def test_family_user_text_yields_no_special(family):
    _, path, tik, normal = family
    strings = texts(sorted(tik.special_tokens_set))
    compare(path, strings, lambda s: tik.encode_ordinary(normal(s)), "--user", normal=normal)


def test_family_long_runs(family):
    _, path, _, _ = family
    compare_runs(path, tokenizers_of(path))
    compare_runs(path, tokenizers_of(path), 1_000_000, RUNS[:5])


@pytest.mark.parametrize("pre, name", [("llama-bpe", "llama3"), ("qwen2", "qwen3"), ("gpt-4o", "gpt-oss")])
def test_family_in_gguf(pre, name, tmp_path):
    how = FAMILIES[name]
    ranks = read_ranks(vocabulary(how["file"]))
    specials = {n: len(ranks) + i for i, n in enumerate(how["names"])}
    tokens = [written(t) for t in sorted(ranks, key=ranks.get)] + list(specials)
    types = [1] * len(ranks) + [4 if n in how.get("added", ()) else 3 for n in specials]
    path = write_gguf(tmp_path / f"{name}.gguf", "gpt2", pre, tokens, types,
                      merges=[f"{written(a)} {written(b)}" for a, b in one_split(ranks)])
    tik = tiktoken_of(ranks, how["pattern"], specials)
    normal = nfc if how.get("nfc") else lambda s: s

    def reference(s):
        return ids_of(cut(specials, s), specials, lambda part: tik.encode_ordinary(normal(part)))

    compare(path, texts(list(specials)), reference, normal=normal)


def test_deepseek_real_file():
    """A tokenizer.json as its maker wrote it, with three splits in a row: no family of ours, but nothing strange."""
    path = vocabulary("deepseek.json")
    names = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
    compare(path, texts(names), tokenizers_of(path))
    compare_runs(path, tokenizers_of(path))


def test_anthropic_real_file_is_refused_by_name():
    done = subprocess.run([*TOOL, vocabulary("anthropic.json")], input=b"", capture_output=True)
    assert done.returncode == 1
    assert "normalizer NFKC is not supported" in done.stderr.decode()


# ------------------------------------------------------------------------------------------------ Mistral's tekken

TEKKEN_NAMES = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
]


@pytest.fixture(scope="module", params=["tekken_240718.json", "tekken_240911.json"])
def tekken(request):
    path = vocabulary(request.param)
    vocab = json.loads(path.read_bytes())["vocab"][:131072 - 1000]
    ranks = {base64.b64decode(item["token_bytes"]): item["rank"] for item in vocab}
    return path, ranks, tiktoken_of(ranks, TEKKEN)


def test_tekken(tekken):
    path, _, tik = tekken

    def plain(s):
        return [1000 + i for i in tik.encode_ordinary(s)]

    def parsed(s):
        return ids_of(cut(TEKKEN_NAMES, s), {name: i for i, name in enumerate(TEKKEN_NAMES)}, plain)

    compare(path, texts(TEKKEN_NAMES), parsed)
    compare(path, texts(TEKKEN_NAMES), plain, "--user")


def test_tekken_against_mistral_common(tekken):
    mistral = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    reference = mistral.Tekkenizer.from_file(tekken[0])
    compare(tekken[0], texts([]), lambda s: reference.encode(s, bos=False, eos=False), "--user")


def test_tekken_as_tokenizer_json_and_gguf(tekken, tmp_path):
    _, ranks, tik = tekken
    specials = {n: i for i, n in enumerate(TEKKEN_NAMES + [f"<SPECIAL_{i}>" for i in range(20, 1000)])}
    shifted = {token: 1000 + rank for token, rank in ranks.items()}
    path = write_json(tmp_path / "tokenizer.json", shifted, every_split(shifted), TEKKEN, specials, low=True,
                      bos="<s>", ignore_merges=True)
    compare(path, texts(TEKKEN_NAMES), tokenizers_of(path))
    compare_runs(path, tokenizers_of(path))
    tokens = list(specials) + [written(t) for t in sorted(ranks, key=ranks.get)]
    path = write_gguf(tmp_path / "vocabulary.gguf", "gpt2", "tekken", tokens, [3] * 1000 + [1] * len(ranks),
                      merges=[f"{written(a)} {written(b)}" for a, b in one_split(ranks)])
    compare(path, texts(TEKKEN_NAMES), lambda s: [1000 + i for i in tik.encode_ordinary(s)], "--user")


# ------------------------------------------------------------------------------------------------ SentencePiece


@pytest.fixture(scope="module", params=["mistral_v1.model", "mistral_v7.model"])
def sentencepiece(request):
    path = vocabulary(request.param)
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(path))


def type_of(sp, i):
    return 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 5 if sp.is_unused(i) else 1


def test_sentencepiece_in_gguf(sentencepiece, tmp_path):
    sp, n = sentencepiece, sentencepiece.vocab_size()
    pieces, types = [sp.id_to_piece(i) for i in range(n)], [type_of(sp, i) for i in range(n)]
    scores = [sp.get_score(i) for i in range(n)]
    path = write_gguf(tmp_path / "vocabulary.gguf", "llama", None, pieces, types, scores=scores,
                      add_bos_token_id=1, add_eos_token_id=2, add_unk_token_id=0)
    compare(path, texts(["<s>", "</s>", "[INST]", "[/INST]"]), sp.encode, "--user", decode=sp.decode)
    compare_runs(path, sp.encode)


def test_sentencepiece_as_tokenizer_json(sentencepiece, tmp_path):
    sp, n = sentencepiece, sentencepiece.vocab_size()
    pieces = [sp.id_to_piece(i) for i in range(n)]
    vocab, merges = {piece: i for i, piece in enumerate(pieces)}, []
    for i, piece in enumerate(pieces):
        ways = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab]
        merges += [(*way, sp.get_score(i)) for way in sorted(ways, key=lambda w: (vocab[w[0]], vocab[w[1]]))]
    merges = [f"{a} {b}" for a, b, _ in sorted(merges, key=lambda m: -m[2])]
    controls = [i for i in range(n) if type_of(sp, i) in (2, 3)]
    path = write_tokenizer(
        tmp_path / "tokenizer.json", vocab, merges, [added_token(i, pieces[i]) for i in controls],
        normalizer={"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        post=begin_with("<s>", 1),
        decoder={"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    reference = pytest.importorskip("tokenizers").Tokenizer.from_file(str(path))
    compare(path, texts([pieces[i] for i in controls][:12]), tokenizers_of(path),
            decode=lambda ids: reference.decode(ids, skip_special_tokens=False))
    compare_runs(path, tokenizers_of(path))


# ------------------------------------------------------------------------------------------------ the default model


def test_smollm2(smollm2, tmp_path):
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(smollm2).fields
    tokens, types, merges = (fields["tokenizer.ggml." + k].contents() for k in ("tokens", "token_type", "merges"))
    added = [added_token(i, t) for i, t in enumerate(tokens) if types[i] == 3]
    names = [a["content"] for a in added]
    digits = {"type": "Digits", "individual_digits": True}
    path = write_tokenizer(tmp_path / "tokenizer.json", {t: i for i, t in enumerate(tokens)}, merges, added,
                           pre={"type": "Sequence", "pretokenizers": [digits, byte_level(True)]},
                           decoder=byte_level(True))
    for p in (pathlib.Path(smollm2), path):
        compare(p, texts(names), tokenizers_of(path))
    compare_runs(pathlib.Path(smollm2), tokenizers_of(path))
    _, load, _ = drive(smollm2, [])
    assert load < 250, f"loading took {load:.0f} ms"
