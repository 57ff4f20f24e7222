#!/usr/bin/env python3
"""Compares the texts of `lm serve`, asked for together and left at random, with those of `lm generate` alone.

Usage: python3 benchmarks/serve_tokens.py --lm PROGRAM --model FILE.gguf [--requests 2000] [--tokens 16] [--flags="--tp 2"].. [--mpi 2]

Clients send greedy requests in groups of 1 to 16 that join each other at random times; a fifth of them leave at any token. With quantized
weights, sums depend on what else is in a pass, so texts may part where two tokens are about as likely: the table says how many do, and by
how much the token of the server is more likely there than that of `lm generate`, in log-probability.
"""
import argparse
import json
import os
import random
import subprocess
import threading
import time
import urllib.request

HEADS = ("Once upon a time", "The capital of France", "def main():", "In 1969")
PROMPTS = [f"{head} {tail}" for head in HEADS for tail in ("there was", "is", "we", "and then", "x =")]


def post(address, path, fields):
    return urllib.request.urlopen(urllib.request.Request(f"{address}{path}", json.dumps(fields).encode(), {"Content-Type": "application/json"}))


def ask(address, prompt, tokens, **fields):
    return post(address, "/v1/completions", dict(prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, **fields))


def alone(args, prompt):
    """The tokens of `lm generate`."""
    command = [args.lm, "generate", "--model", args.model, "--prompt", prompt, "--max-tokens", str(args.tokens), "--temperature", "0", "--json", "-"]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(made.stdout)["tokens"]


def one(address, tokens, dice, made):
    prompt = dice.choice(PROMPTS)
    time.sleep(dice.random() * 0.3)
    if dice.random() < 0.2:
        with ask(address, prompt, tokens, stream=True) as stream:
            for _ in range(dice.randrange(8)):
                stream.readline()
        made.append((prompt, None))
    else:
        made.append((prompt, json.load(ask(address, prompt, tokens, logprobs=10))["choices"][0]["logprobs"]))


def lead(told, want):
    """By how much the token of a text is more likely than that of another text where they part; `None` if they do not."""
    parted = next((at for at, (token, other) in enumerate(zip(told["tokens"], want)) if token != other), None)
    if parted is None:
        return None
    likely = told["top_logprobs"][parted]
    return likely[told["tokens"][parted]] - likely.get(want[parted], float("-inf"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", required=True, help="the program lm")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--requests", type=int, default=2000, help="of all servers together")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--flags", action="append", help="ranks of a server; each is one of its own [none, --tp 2 and --pp 2]")
    parser.add_argument("--mpi", type=int, default=0, help="so many processes for a further server of --tp ranks")
    args = parser.parse_args()
    wanted = {prompt: alone(args, prompt) for prompt in PROMPTS}
    servers = [(flags, []) for flags in args.flags or ["", "--tp 2", "--pp 2"]]
    if args.mpi:
        servers.append((f"--tp {args.mpi} --backend mpi", ["mpirun", "--oversubscribe", "-n", str(args.mpi)]))
    print("| ranks | requests | left | other texts | largest lead where they part |\n|---|---|---|---|---|")
    for flags, launcher in servers:
        command = [*launcher, args.lm, "serve", "--model", args.model, "--port", "0", "--slots", "16", "--cache-tokens", "256", *flags.split()]
        root = dict(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | root)
        address = next(word.rstrip(":") for line in server.stdout for word in line.split() if word.startswith("http://"))
        dice, made = random.Random(flags), []
        while len(made) < args.requests // len(servers):
            threads = [threading.Thread(target=one, args=(address, args.tokens, random.Random(dice.random()), made)) for _ in range(dice.randint(1, 16))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        text_of = {token: json.load(post(address, "/detokenize", dict(tokens=[token])))["content"] for tokens in wanted.values() for token in tokens}
        leads = [lead(told, [text_of[token] for token in wanted[prompt]]) for prompt, told in made if told]
        others = [ahead for ahead in leads if ahead is not None]
        left = sum(told is None for _, told in made)
        print(f"| {flags or '--tp 1'} | {len(made)} | {left} | {len(others)} | {max(others, default=0):.2g} |", flush=True)
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
