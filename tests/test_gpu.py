"""The golden logits and greedy tokens on a GPU (`make gpu-test`); skipped where there is none."""
import json

import numpy as np
import pytest

from test_golden import CASES, load, relative

DEVICE = ("--device", "cuda:0")

# Products take activations as bf16 and add in float: against float32 references that is a rounding of 2^-9 a product.
LIMIT = 2e-2


@pytest.fixture(scope="session")
def gpu(hearth, tmp_path_factory):
    model, expect, _ = load(CASES[0])
    out = tmp_path_factory.mktemp("gpu") / "out.npy"
    done = hearth.run("logits", model, "--ids", "1", "-o", out, *DEVICE)
    text = done.stderr.decode()
    if "no GPU is seen" in text or "no CUDA backend" in text:
        pytest.skip("no CUDA device")
    assert done.returncode == 0, text
    return hearth


def logits(gpu, model, ids, tmp_path, *flags):
    out = tmp_path / "out.npy"
    gpu.ok("logits", model, "--ids", ",".join(map(str, ids)), "-o", out, *DEVICE, *flags)
    return np.load(out)


@pytest.mark.parametrize("case", CASES)
def test_logits(gpu, tmp_path, case):
    model, expect, want = load(case)
    got = logits(gpu, model, expect["ids"], tmp_path)
    assert relative(got, want) < LIMIT
    error = np.abs(got - want).max(axis=1)
    top = np.sort(want, axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * error
    assert (got.argmax(1) == want.argmax(1))[clear].all()


@pytest.mark.parametrize("case", CASES)
def test_chunks(gpu, tmp_path, case):
    """One row a step (captured and replayed), a few, all: the order of sums is all that differs."""
    model, expect, _ = load(case)
    one = logits(gpu, model, expect["ids"], tmp_path)
    for chunk in ("1", "7"):
        assert relative(logits(gpu, model, expect["ids"], tmp_path, "--chunk", chunk), one) < LIMIT / 2, chunk


def test_info_names_the_device(gpu):
    model, _, _ = load(CASES[0])
    assert json.loads(gpu.ok("info", model, "--json", *DEVICE))["device"].startswith("cuda:0 ")


def test_a_device_that_is_not_there(gpu):
    model, _, _ = load(CASES[0])
    assert "cuda:99" in gpu.fails("run", model, "-p", "x", "--device", "cuda:99")
