#!/usr/bin/env python3
"""Measures Hearth and other engines on one GGUF file, in turn, and prints medians: the rows of docs/performance.md.

Usage: tools/peers.py MODEL.gguf --peer NAME=DIR [--peer NAME=DIR] [--batch 8,64] [--rounds 3] [--threads 2]

DIR holds llama-bench and llama-batched-bench (llama.cpp, or a fork of it). Each round runs every engine once; a ratio is
the median of the rounds' ratios. Prefill is 512 tokens, decode 64 tokens from an empty context; at a batch, each sequence
decodes 32 tokens after a prompt of 128."""
import argparse
import json
import pathlib
import statistics
import subprocess

HEARTH = pathlib.Path(__file__).resolve().parent.parent / "build" / "hearth"


def run(*command):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd="/tmp")


def hearth(model, threads, batches):
    def bench(*flags):
        done = run(HEARTH, "bench", model, "--threads", threads, "--json", *flags)
        if done.returncode:
            raise SystemExit(done.stderr)
        return json.loads(done.stdout)

    prompt, answer = bench("--batch", 1, "--pp", 512, "--tg", 0), bench("--batch", 1, "--pp", 1, "--tg", 64)
    p, a = prompt["rows"][0], answer["rows"][1]
    out = {"prefill": p["tok_s"], "decode": a["tok_s"], "prefill share, %": 100 * p["share"], "decode share, %": 100 * a["share"],
           "decode GB/s": a["gb_s"], "read GB/s": answer["machine"]["read_gb_s"]}
    if batches:
        for row in bench("--batch", batches, "--pp", 128, "--tg", 32)["rows"]:
            if row["phase"] == "decode":
                out[f"batch {row['batch']}"] = row["tok_s"]
    return out


def peer(folder, model, threads, batches):
    out = {}
    done = run(folder / "llama-bench", "-m", model, "-t", threads, "-p", 512, "-n", 64, "-r", 1, "-o", "json")
    for row in json.loads(done.stdout):
        out["prefill" if row["n_prompt"] else "decode"] = row["avg_ts"]
    if batches:
        done = run(folder / "llama-batched-bench", "-m", model, "-t", threads, "-c", 12288, "-b", 2048, "-ub", 512, "-npp", 128,
                   "-ntg", 32, "-npl", batches)
        for line in (done.stdout + done.stderr).splitlines():
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) > 9 and cells[1] == "128":
                out[f"batch {cells[3]}"] = float(cells[8])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--batch", default="", metavar="LIST")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    model, peers = args.model.resolve(), [p.split("=", 1) for p in args.peer]
    rounds = []
    for _ in range(args.rounds):
        rounds.append({"hearth": hearth(model, args.threads, args.batch),
                       **{name: peer(pathlib.Path(folder), model, args.threads, args.batch) for name, folder in peers}})
    print(model.name)
    for what in rounds[0]["hearth"]:
        line = f"  {what:18s} {statistics.median(r['hearth'][what] for r in rounds):9.1f}"
        for name, _ in peers:
            if all(what in r[name] for r in rounds):
                line += (f"   {name} {statistics.median(r[name][what] for r in rounds):8.1f}"
                         f" (x {statistics.median(r['hearth'][what] / r[name][what] for r in rounds):.2f})")
        print(line)


if __name__ == "__main__":
    main()
