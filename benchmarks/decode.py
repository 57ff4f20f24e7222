#!/usr/bin/env python3
"""Measures prompt and decode speed on a quantized model, here, in candle-transformers and in llama.cpp, alternately.

Usage: python3 benchmarks/decode.py [--model FILE] [--rounds 5] [--max-tokens 64] [--sentences 10] [--prompt TEXT]
       [--context 4096]
       [--llama-python PYTHON]

Without --model, it takes the SmolLM2-135M-Instruct of scripts/smollm2.sh. A rank has one thread where nothing else is said. Without a Python that
has llama-cpp-python or xllamacpp (--llama-python, or LLAMA_PYTHON in the environment), llama.cpp is left out. The wheels of
xllamacpp use no AVX-512; llama-cpp-python is built for the machine.
"""
import argparse
import os
import statistics
import subprocess
import sys

from side_by_side import PEERS, ROOT, build, has, output, say

# A long prompt, so that its rows and not the dispatch of ops take the time.
SENTENCE = "The river runs from the mountains to the sea, and on its way it passes fields, villages and old mills. "


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file of a Llama")
    parser.add_argument("--rounds", type=int, default=5, help="alternating runs of each side [5]")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to write [64]")
    parser.add_argument("--context", type=int, default=4096, help="tokens that the cache of llama.cpp has room for [4096]")
    parser.add_argument("--sentences", type=int, default=10, help="sentences of the prompt, of 22 tokens each [10]")
    parser.add_argument("--prompt", help="another text to continue")
    python = os.environ.get("LLAMA_PYTHON", sys.executable)
    parser.add_argument("--llama-python", default=python, help="a Python with llama-cpp-python or xllamacpp")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="only sides whose name has one of these texts")
    args = parser.parse_args()
    if args.rounds < 1 or args.max_tokens < 2:
        parser.error("give at least 1 for --rounds and 2 for --max-tokens")
    model = args.model or subprocess.check_output([ROOT / "scripts" / "smollm2.sh"], text=True).strip()
    if not model:
        sys.exit("scripts/smollm2.sh found no model; give one with --model.")
    prompt = SENTENCE * args.sentences if args.prompt is None else args.prompt
    task = ["--model", model, "--prompt", prompt, "--max-tokens", str(args.max_tokens)]
    lm = [build("lm"), "generate", *task, "--temperature", "0", "--json", "-"]
    candle = [build("candle-decode", kind="example"), *task]
    sides = {
        "1 rank": ([*lm, "--tp", "1"], 1),
        "1 rank of 2 threads": ([*lm, "--tp", "1"], 2),
        "2 ranks": ([*lm, "--tp", "2"], 1),
        "candle-transformers, 1 thread": (candle, 1),
        "candle-transformers, 2 threads": (candle, 2),
    }
    packages = [("llama-cpp-python", "import llama_cpp, numpy"), ("xllamacpp", "import xllamacpp")]
    package = next((name for name, line in packages if has(args.llama_python, line)), None)
    if package:
        peer = [args.llama_python, PEERS / "llamacpp.py", *task, "--context", str(args.context)]
        for threads, name in ((1, "1 thread"), (2, "2 threads")):
            sides[f"llama.cpp ({package}), {name}"] = ([*peer, "--threads", str(threads)], threads)
    else:
        say(f"llama.cpp is left out: {args.llama_python} has neither llama-cpp-python nor xllamacpp.")
    sides = {name: side for name, side in sides.items() if any(text in name for text in args.only)}
    if "1 rank" not in sides:
        parser.error("--only leaves out 1 rank, with which others are compared")
    speeds = {name: {"prompt_tokens_per_s": [], "tokens_per_s": []} for name in sides}
    for _ in range(args.rounds):
        for name, (command, threads) in sides.items():
            made = output(command, threads=threads)
            for key, series in speeds[name].items():
                series.append(made[key])
    print("| side | prompt, tokens/s | prompt, of 1 rank | decode, tokens/s | decode, of 1 rank | spread of the ratio |")
    print("|---|---|---|---|---|---|")
    alone, prompt_alone = speeds["1 rank"]["tokens_per_s"], speeds["1 rank"]["prompt_tokens_per_s"]
    for name, made in speeds.items():
        ratios = [a / b for a, b in zip(made["tokens_per_s"], alone)]
        prompt, decode = (statistics.median(made[key]) for key in ("prompt_tokens_per_s", "tokens_per_s"))
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        gain = statistics.median(a / b for a, b in zip(made["prompt_tokens_per_s"], prompt_alone))
        print(f"| {name} | {prompt:.0f} | {gain:.2f} | {decode:.1f} | {statistics.median(ratios):.2f} | {spread} |")


if __name__ == "__main__":
    main()
