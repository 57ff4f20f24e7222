#!/usr/bin/env python3
"""Measures the time from the start of a program to the first token of a GGUF model, here and in llama.cpp, alternately.

Usage: python3 benchmarks/first_token.py MODEL.gguf --llama-python PYTHON [--rounds 3]
(PYTHON has xllamacpp; benchmarks/peers/gguf_model.py writes a model of 1.1 GB)

The file is in the page cache. Ours is the whole process; that of llama.cpp begins behind the imports of Python, without its warm-up.
Also prints how long a copy of the file to nowhere takes, which is what the disk, here the cache, can do.
"""
import argparse
import json
import statistics
import subprocess
import time

from side_by_side import PEERS, build, has, output, say, with_threads

PROMPT = "The river runs from the mountains to the sea"


def copied(path):
    began = time.perf_counter()
    buffer = bytearray(8 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if not has(args.llama_python, "import xllamacpp"):
        parser.error(f"{args.llama_python} has no xllamacpp")
    program = build("lm")
    task = ["--model", args.model, "--prompt", PROMPT]
    peer = [args.llama_python, PEERS / "llamacpp.py", *task, "--first-token", "--threads"]
    sides = {"copy of the file": lambda: copied(args.model)}
    for ranks, threads in ((1, 1), (1, 2), (2, 1)):

        def ours(ranks=ranks, threads=threads):
            command = [program, "generate", *task, "--tp", str(ranks), "--threads", str(threads), "--max-tokens", "1", "--temperature", "0"]
            began = time.perf_counter()
            subprocess.run(list(map(str, command)), env=with_threads(threads), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return time.perf_counter() - began

        sides[f"{ranks} × {threads}"] = ours
    for threads in (1, 2):
        sides[f"llama.cpp, {threads} threads"] = lambda threads=threads: output([*peer, str(threads)], threads=threads)["first_token_s"]
    seconds = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            seconds[name].append(side())
    print("| side | seconds | spread |\n|---|---:|---|")
    for name, series in seconds.items():
        print(f"| {name} | {statistics.median(series):.3f} | {min(series):.3f} to {max(series):.3f} |")
    say(json.dumps(seconds))


if __name__ == "__main__":
    main()
