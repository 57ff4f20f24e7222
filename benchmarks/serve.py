#!/usr/bin/env python3
"""Compares `lm serve` with llama.cpp's server on one machine, by clients that read streams.

Usage: python3 benchmarks/serve.py --lm PROGRAM --model FILE.gguf [--peer PYTHON] [--rounds 5] [--flags="--tp 2"].. [--tokens 64] [--rows WORD..]

Each `--flags` is a server of its own, for example "--tp 2" for two ranks and "--threads 2" for one rank with two threads.

PYTHON has xllamacpp, of which `benchmarks/peers/llamacpp_server.py` starts the server with 2 threads; without it, `lm serve` is measured alone.
Servers run one after another in each round, in another order each time, and a number is the median of the rounds, with the least and the
most behind it. Texts go on to `--tokens` whatever the model says.

- at once: so many clients ask together, each with a prompt of its own of about 100 tokens: tokens of all texts per second, and the median
  time to the first token.
- shared: 8 clients, one after another, with one long text in front of their questions: the median time to the first token of all but the
  first. Unshared: the same, where each client's cache is its own.
- prompt: the tokens per second of a prompt of about 1,500 tokens, to its first token.
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


def ask(address, prompt, tokens, **more):
    """The times of the pieces of a text, from when it was asked for, how many tokens it has, and its prompt."""
    fields = dict(prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, stream=True, stream_options=dict(include_usage=True), **more)
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"})
    began, times, used, read = time.perf_counter(), [], 0, 0
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                used, read = event["usage"]["completion_tokens"], event["usage"]["prompt_tokens"]
            if event.get("choices") and event["choices"][0].get("text"):
                times.append(time.perf_counter() - began)
    return times, used, read


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
    return sum(used for _, used, _ in made) / seconds, statistics.median(times[0] for times, *_ in made)


def at_once(count):
    def measure(address, tokens, start):
        rate, first = together(address, [text(start + 977 * at + count, 70) for at in range(count)], tokens)
        return {f"{count} at once, tokens/s": rate, f"{count} at once, first token, s": first}

    return measure


def shared(address, _, start):
    head = text(start + 31, 400)
    asked = [f"{head}\nQuestion {at}: {text(start + at, 8)}" for at in range(8)]
    firsts = [ask(address, prompt, 2)[0][0] for prompt in asked]
    # The names of two servers for the same.
    alone = [ask(address, prompt, 2, cache_salt=f"{start} {at}", cache_prompt=False)[0][0] for at, prompt in enumerate(asked)]
    return {"shared text, first token, s": statistics.median(firsts[1:]), "unshared text, first token, s": statistics.median(alone[1:])}


def prompt(address, _, start):
    times, _, read = ask(address, text(start + 91, 600), 2)
    return {"prompt, tokens/s": read / times[0]}


def gap(address, tokens, start):
    made, ended = [], []

    def write():
        made.append(ask(address, text(start + 5, 20), 8 * tokens))
        ended.append(time.perf_counter())

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(0.7)
    ask(address, text(start + 57, 550), 2)
    read = time.perf_counter()
    writer.join()
    if ended[0] < read:
        sys.exit("The text ended before the prompt was read: give more --tokens.")
    times = made[0][0]
    return {"longest gap, s": max(b - a for a, b in zip(times, times[1:]))}


ROWS = {"1": at_once(1), "4": at_once(4), "16": at_once(16), "shared": shared, "prompt": prompt, "gap": gap}


def measure(address, tokens, start, rows):
    """The numbers of one server in one round; `start` says which texts are asked for, so that no round finds those of another in a cache."""
    told = {}
    for row in rows:
        told |= ROWS[row](address, tokens, start)
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--flags", action="append", help='ranks and threads of lm serve, as --flags="--tp 2"; each is a server of its own [--tp 2]')
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="what is measured [all]")
    args = parser.parse_args()
    ours = [args.lm, "serve", "--model", args.model, "--port", 0, "--slots", 16, "--cache-tokens", 2048]
    servers = {f"lm serve {flags}": [*ours, *flags.split()] for flags in args.flags or ["--tp 2"]}
    if args.peer:
        servers["llama.cpp"] = [args.peer, ROOT / "benchmarks/peers/llamacpp_server.py", "--model", args.model]
    rounds = {name: [] for name in servers}
    for at in range(args.rounds):
        for place in range(len(servers)):
            name, command = list(servers.items())[(at + place) % len(servers)]
            server, address = started(command)
            try:
                ask(address, "Once", 4)
                rounds[name].append(measure(address, args.tokens, 5000 * at, args.rows))
            finally:
                server.terminate()
                server.wait()
    print(f"| | {' | '.join(rounds)} |\n|---|{'---|' * len(rounds)}")
    for row in next(iter(rounds.values()))[0]:
        cells = [[one[row] for one in made] for made in rounds.values()]
        print(f"| {row} | {' | '.join(f'{statistics.median(cell):.3g} ({min(cell):.3g}–{max(cell):.3g})' for cell in cells)} |")


if __name__ == "__main__":
    main()
