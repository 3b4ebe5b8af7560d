#!/usr/bin/env python3
"""Measures one model on this machine and prints the rows of docs/performance.md.

Usage: tools/perf.py MODEL.gguf [--llama-bench PATH] [--pairs 5] [--threads 2]

Everything is measured in one run, in turn: the file read once, Hearth, and with --llama-bench the same
prompt and answer lengths there, a pair after the other. Printed are medians, and the smallest and largest value behind them.
The page cache is warm: the file is read before."""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEARTH = ROOT / "build" / "hearth"
PROMPT, ANSWER = 512, 128


def prompt_of(model, n):
    """Text that becomes about n tokens: the beginning of Alice, as the model's own tokenizer cuts it."""
    text = (ROOT / "tests" / "data" / "alice.txt").read_text()
    ids = subprocess.run([HEARTH, "tokenize", "--no-bos", model], input=text.encode(), capture_output=True, check=True).stdout.split()
    return subprocess.run([HEARTH, "tokenize", "--decode", model], input=b" ".join(ids[:n]), capture_output=True, check=True).stdout.decode()


def hearth(model, prompt, n, threads):
    command = [HEARTH, "run", model, "--raw", "-p", prompt, "-n", str(n), "--temp", "0", "--threads", str(threads), "--ctx", "1024", "--json"]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"perf: {' '.join(map(str, command[:3]))} failed")
    result = json.loads(out)
    result["wall_s"] = time.perf_counter() - start
    result["rss"] = usage.ru_maxrss * 1024
    return result


def llama(bench, model, threads):
    command = [bench, "-m", model, "-t", str(threads), "-p", str(PROMPT), "-n", str(ANSWER), "-r", "1", "-o", "json"]
    rows = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {"prefill_tok_s": next(r["avg_ts"] for r in rows if r["n_prompt"]), "decode_tok_s": next(r["avg_ts"] for r in rows if r["n_gen"])}


def read_file(model, fresh):
    """Seconds to read the file once: into one small buffer again and again, or into fresh memory that holds all of it."""
    start = time.perf_counter()
    with open(model, "rb", buffering=0) as f:
        if fresh:
            f.read()
        else:
            while f.read(1 << 20):
                pass
    return time.perf_counter() - start


def row(name, values, unit, digits=1):
    print(f"{name:44} {statistics.median(values):10.{digits}f} {unit:6} ({min(values):.{digits}f} to {max(values):.{digits}f}, {len(values)} runs)")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--llama-bench")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    long, short = prompt_of(a.model, PROMPT), prompt_of(a.model, 1)
    mine, theirs, reads, loads, first = [], [], [], [], []
    hearth(a.model, short, 1, a.threads)
    for _ in range(a.pairs):
        reads.append(read_file(a.model, False))
        loads.append(read_file(a.model, True))
        first.append(hearth(a.model, short, 1, a.threads))
        mine.append(hearth(a.model, long, ANSWER, a.threads))
        if a.llama_bench:
            theirs.append(llama(a.llama_bench, a.model, a.threads))
    print(f"{a.model}, {a.threads} threads, prompt {mine[0]['prompt_tokens']}, answer {len(mine[0]['ids'])}")
    for key, name in (("prefill_tok_s", "prefill"), ("decode_tok_s", "decode, batch 1")):
        row(f"{name}, hearth", [m[key] for m in mine], "tok/s")
        if theirs:
            row(f"{name}, llama.cpp", [t[key] for t in theirs], "tok/s")
            row(f"{name}, ratio of pairs", [m[key] / t[key] for m, t in zip(mine, theirs)], "x", 2)
    row("the file read once, into 1 MiB", [r * 1e3 for r in reads], "ms")
    row("the file read once, into memory", [r * 1e3 for r in loads], "ms")
    row("start to first token, prompt of 1 token", [f["start_to_first_token_s"] * 1e3 for f in first], "ms")
    row("  over the file read into memory", [f["start_to_first_token_s"] / r for f, r in zip(first, loads)], "x", 2)
    row("whole process, 1 token", [f["wall_s"] * 1e3 for f in first], "ms")
    row("largest resident set, context 1024", [m["rss"] / 1e6 for m in mine], "MB")


if __name__ == "__main__":
    main()
