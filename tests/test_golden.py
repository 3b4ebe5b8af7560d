"""Logits of every family and format against transformers (tests/golden, made by make_golden.py)."""
import json
import pathlib

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = sorted(p.parent.name for p in GOLDEN.glob("*/expect.json"))

# What products compute in at the SIMD levels, where it is not float32: int8 activations for these formats at all of
# them, bf16 activations for BF16 and FP8 weights at the levels that say so. Level c is float32 throughout.
INT8 = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4")
FLOAT_LIMIT, ROUNDED_LIMIT = 1e-3, 2e-2


def load(case):
    expect = json.loads((GOLDEN / case / "expect.json").read_text())
    return GOLDEN / case / expect["model"], expect, np.load(GOLDEN / case / "logits.npy")


def logits(hearth, model, ids, tmp_path, *flags):
    out = tmp_path / "out.npy"
    hearth.ok("logits", model, "--ids", ",".join(map(str, ids)), "-o", out, *(flags or ("--device", "cpu")))
    return np.load(out)


def relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_every_case_is_here():
    assert len(CASES) == 40


@pytest.mark.parametrize("case", CASES)
def test_float32(hearth, tmp_path, case):
    model, expect, want = load(case)
    got = logits(hearth, model, expect["ids"], tmp_path, "--cpu", "c")
    assert got.shape == want.shape and got.dtype == np.float32
    assert relative(got, want) < FLOAT_LIMIT


def levels(hearth):
    """The levels this machine has, as the program names them when it is asked for another."""
    model = load(CASES[0])[0]
    message = hearth.fails("logits", model, "--ids", "1", "-o", "/dev/null", "--cpu", "none")
    return message.rsplit("choose one of ", 1)[1].strip().split(", ")


@pytest.mark.parametrize("case", CASES)
def test_every_level(hearth, tmp_path, case):
    model, expect, want = load(case)
    for level in levels(hearth)[1:]:
        got = logits(hearth, model, expect["ids"], tmp_path, "--cpu", level)
        rounded = any(f in case for f in INT8) or level in ("avx512bf16", "neonmm")
        assert relative(got, want) < (ROUNDED_LIMIT if rounded else FLOAT_LIMIT), level
        # The same best id wherever the reference's margin is larger than what the error can turn.
        error = np.abs(got - want).max(axis=1)
        top = np.sort(want, axis=1)
        clear = top[:, -1] - top[:, -2] > 2 * error
        assert clear.sum() > len(clear) // 2, level
        assert (got.argmax(1) == want.argmax(1))[clear].all(), level


@pytest.mark.parametrize("case", CASES)
def test_same_bits_for_any_threads_and_chunks(hearth, tmp_path, case):
    model, expect, _ = load(case)
    cpu = ("--device", "cpu")
    one = logits(hearth, model, expect["ids"], tmp_path, *cpu, "--threads", "1")
    for flags in (("--threads", "2"), ("--threads", "5"), ("--threads", "2", "--chunk", "7")):
        assert (logits(hearth, model, expect["ids"], tmp_path, *cpu, *flags) == one).all(), flags
