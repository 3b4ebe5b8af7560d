"""hearth bench: what it prints, what it counts, and what it refuses."""
import json

import pytest

SMALL = "tinyllama-1.1b:q4_0:layers=1"
SHAPES = ["gpt-oss-120b", "gpt-oss-20b", "llama-3.1-8b", "llama-3.2-1b", "tinyllama-1.1b", "mistral-small-3.1-24b",
          "qwen3-coder-30b-a3b"]


@pytest.fixture(scope="module")
def small(hearth):
    out = hearth.ok("bench", "--synthetic", SMALL, "--batch", "1,3", "--pp", "40", "--tg", "4", "--threads", "2", "--json")
    return json.loads(out)


def test_json_has_the_machine_and_a_row_a_phase(small):
    machine = small["machine"]
    assert machine["threads"] == 2 and machine["read_gb_s"] > 0 and all(v > 0 for v in machine["peaks"].values())
    assert [(r["phase"], r["batch"], r["tokens"]) for r in small["rows"]] == [
        ("prefill", 1, 40), ("decode", 1, 4), ("prefill", 3, 40), ("decode", 3, 4)]
    for r in small["rows"]:
        assert set(r) == {"phase", "batch", "tokens", "tok_s", "gb_s", "gop_s", "ceiling", "share"}
        assert r["tok_s"] > 0 and r["share"] > 0
        assert r["ceiling"] == "read" or r["ceiling"] in machine["peaks"]


def test_bytes_and_operations_are_those_of_the_shape(small):
    """One layer of TinyLlama: 5.25 M weights of attention, 34.6 M of the FFN, and 65.5 M of the head."""
    layer, head = 2048 * (2048 + 2 * 256 + 2048) + 3 * 2048 * 5632, 2048 * 32000
    for r in small["rows"]:
        if r["phase"] != "decode":
            continue
        steps_s = r["tok_s"] / r["batch"]
        weights = 18 / 32 * (layer + head)
        keys = 2 * 2 * 256 * 43 * r["batch"]  # f16 keys and values of about 43 positions
        assert r["gb_s"] * 1e9 / steps_s == pytest.approx(weights + keys, rel=0.01)
        assert r["gop_s"] * 1e9 / r["tok_s"] == pytest.approx(2 * (layer + head), rel=0.01)


def test_experts_count_as_they_are_read(hearth):
    """At batch 1 four of 32 experts are read; the bytes say so."""
    out = hearth.ok("bench", "--synthetic", "gpt-oss-20b:mxfp4:layers=1", "--batch", "1", "--pp", "1", "--tg", "3", "--json")
    decode = json.loads(out)["rows"][1]
    d, expert = 2880, 3 * 2880 * 2880
    rest = 2 * (d * 64 * 64 * 2 + d * 2 * 8 * 64 + 201088 * d + 32 * d)
    assert decode["gb_s"] * 1e9 / decode["tok_s"] == pytest.approx(rest + 4 * expert * 17 / 32, rel=0.01)


def test_table(hearth):
    out = hearth.ok("bench", "--synthetic", SMALL, "--batch", "2", "--pp", "8", "--tg", "2").splitlines()
    assert out[0].startswith(SMALL) and "GB/s" in out[1] and "measured now" in out[1]
    assert out[2].split() == ["phase", "batch", "tokens", "tok/s", "GB/s", "GOP/s", "ceiling", "share"]
    assert [line.split()[:3] for line in out[3:]] == [["prefill", "2", "8"], ["decode", "2", "2"]]


def test_only_prefill(hearth):
    out = hearth.ok("bench", "--synthetic", SMALL, "--batch", "1", "--pp", "8", "--tg", "0", "--repeat", "3", "--json")
    assert [r["phase"] for r in json.loads(out)["rows"]] == ["prefill"]


def test_a_file_is_a_model_too(hearth, smollm2):
    out = json.loads(hearth.ok("bench", smollm2, "--batch", "1", "--pp", "8", "--tg", "2", "--json"))
    assert out["model"] and len(out["rows"]) == 2


def test_more_threads_than_cores_work_and_are_named(hearth):
    done = hearth.run("bench", "--synthetic", SMALL, "--batch", "1", "--pp", "4", "--tg", "1", "--threads", "100")
    assert done.returncode == 0 and b"100 threads" in done.stdout
    assert b"warning: 100 threads on " in done.stderr


@pytest.mark.parametrize("args,said", [
    (["--synthetic", "llama-9:q8_0"], "known are " + ", ".join(SHAPES)),
    (["--synthetic", "llama-3.1-8b:q9"], "no format of a synthetic model is called 'q9': known are f32, f16, bf16, fp8"),
    (["--synthetic", "llama-3.1-8b"], "a synthetic model is SHAPE:FORMAT"),
    (["--synthetic", "llama-3.1-8b:q8_0:deep"], "known are layers=N"),
    (["--synthetic", "llama-3.1-8b:q8_0:layers=0"], "layers are a number from 1"),
    (["--synthetic", "llama-3.1-8b:q8_0:layers=4x"], "layers are a number from 1"),
    (["--synthetic", "gpt-oss-20b:q4_k"], "2880 columns, which q4_k cannot hold in its blocks of 256"),
    (["--synthetic", "gpt-oss-120b:f32:layers=400"], "GB are free"),
    (["--synthetic", "x" * 300], "is no synthetic model"),
    (["--synthetic", SMALL, "model.gguf"], "one of them"),
    (["--kernels", "--synthetic", SMALL], "--kernels takes no model"),
    ([], "MODEL is missing"),
    (["nowhere.gguf"], "nowhere.gguf"),
    (["--synthetic", SMALL, "--batch", "0"], "--batch 0 is out of range"),
    (["--synthetic", SMALL, "--batch", "1,x"], "'x'"),
    (["--synthetic", SMALL, "--batch", ""], "--batch"),
    (["--synthetic", SMALL, "--batch", "1025"], "--batch 1025 is out of range"),
    (["--synthetic", SMALL, "--pp", "0"], "--pp"),
    (["--synthetic", SMALL, "--pp", "4000"], "--pp 4000 and --tg 128 need 4138 positions, the model was made for 2048"),
])
def test_what_is_refused(hearth, args, said):
    assert said in hearth.fails("bench", *args)


def levels(hearth):
    return hearth.fails("bench", "--kernels", "--cpu", "none").rsplit("choose one of ", 1)[1].strip().split(", ")


@pytest.mark.slow
def test_kernels_of_one_level(hearth):
    best = levels(hearth)[-1]
    out = hearth.ok("bench", "--kernels", "--cpu", best, "--batch", "1,3", "--json", timeout=600)
    rows = json.loads(out)["kernels"]
    names = {r["kernel"] for r in rows}
    assert {"linear q8_0", "linear mxfp4", "linear nvfp4", "attend decode", "attend prompt"} <= names
    assert [r["rows"] for r in rows if r["kernel"] == "linear q8_0"] == [1, 3]
    assert all(r["ms"] > 0 and r["share"] > 0 and best in r["device"] for r in rows)
    assert "--batch 513 is out of range 1 to 512" in hearth.fails("bench", "--kernels", "--batch", "513")
