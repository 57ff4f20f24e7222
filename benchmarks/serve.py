#!/usr/bin/env python3
"""Compares `lm serve` with llama.cpp's server on one machine, by clients that read streams.

Usage: python3 benchmarks/serve.py --lm PROGRAM --model FILE.gguf [--peer PYTHON] [--rounds 3] [--flags "--tp 2"] [--tokens 64]

PYTHON has xllamacpp, of which `benchmarks/peers/llamacpp_server.py` starts the server with 2 threads; without it, `lm serve` is measured alone.
Servers run one after another in each round, and a number is the median of the rounds. Texts go on to `--tokens` whatever the model says.

- at once: so many clients ask together, each with a prompt of its own of about 100 tokens: tokens of all texts per second, and the median
  time to the first token.
- shared: 8 clients, one after another, with one long text in front of their questions: the median time to the first token of all but the first.
- gap: a text is written while a prompt of about 1,500 tokens comes: the longest time between two of its tokens.
"""
import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = (ROOT / "ARCHITECTURE.md").read_text().split()


def text(start, words):
    return " ".join(WORDS[(start + at) % len(WORDS)] for at in range(words))


def ask(address, prompt, tokens):
    """The times of the pieces of a text, from when it was asked for, and how many tokens it has."""
    fields = dict(prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, stream=True, stream_options=dict(include_usage=True))
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"})
    began, times, used = time.perf_counter(), [], 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                used = event["usage"]["completion_tokens"]
            if event.get("choices") and event["choices"][0].get("text"):
                times.append(time.perf_counter() - began)
    return times, used


def together(address, prompts, tokens):
    made = [None] * len(prompts)

    def run(at):
        made[at] = ask(address, prompts[at], tokens)

    began = time.perf_counter()
    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    return sum(used for _, used in made) / seconds, statistics.median(times[0] for times, _ in made)


def measure(address, tokens, start):
    """The numbers of one server in one round; `start` says which texts are asked for, so that no round finds those of another in a cache."""
    told = {}
    for count in (1, 4, 16):
        rate, first = together(address, [text(start + 977 * at + count, 70) for at in range(count)], tokens)
        told[f"{count} at once, tokens/s"], told[f"{count} at once, first token, s"] = rate, first
    shared = text(start + 31, 400)
    firsts = [ask(address, f"{shared}\nQuestion {at}: {text(start + at, 8)}", 2)[0][0] for at in range(8)]
    told["shared text, first token, s"] = statistics.median(firsts[1:])
    long, made = text(start + 57, 550), []
    writer = threading.Thread(target=lambda: made.append(ask(address, text(start + 5, 20), 2 * tokens)))
    writer.start()
    time.sleep(0.7)
    ask(address, long, 2)
    writer.join()
    times = made[0][0]
    told["longest gap, s"] = max(b - a for a, b in zip(times, times[1:]))
    return told


def started(command):
    """A server, and its address."""
    server = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in server.stdout:
        words = [word.rstrip(":") for word in line.split() if word.startswith("http://")]
        if words:
            return server, words[0]
    sys.exit(f"{' '.join(map(str, command))} does not start")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", required=True, help="the program lm")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--peer", help="a Python with xllamacpp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--flags", default="--tp 2", help="ranks and threads of lm serve [--tp 2]")
    args = parser.parse_args()
    ours = [args.lm, "serve", "--model", args.model, "--port", 0, "--slots", 16, "--cache-tokens", 2048, *args.flags.split()]
    servers = {"lm serve": ours}
    if args.peer:
        servers["llama.cpp"] = [args.peer, ROOT / "benchmarks/peers/llamacpp_server.py", "--model", args.model]
    rounds = {name: [] for name in servers}
    for at in range(args.rounds):
        for name, command in servers.items():
            server, address = started(command)
            try:
                ask(address, "Once", 4)
                rounds[name].append(measure(address, args.tokens, 5000 * at))
            finally:
                server.terminate()
                server.wait()
    middle = {name: {row: statistics.median(one[row] for one in made) for row in made[0]} for name, made in rounds.items()}
    print(f"| | {' | '.join(middle)} |\n|---|{'---|' * len(middle)}")
    for row in middle["lm serve"]:
        print(f"| {row} | {' | '.join(f'{told[row]:.3g}' for told in middle.values())} |")


if __name__ == "__main__":
    main()
