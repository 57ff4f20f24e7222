#!/usr/bin/env python3
"""Measures llama.cpp (the Python package llama-cpp-python, or else xllamacpp) on a GGUF file: greedy tokens after a prompt;
prints JSON.

Usage: python3 benchmarks/peers/llamacpp.py --model FILE --prompt TEXT [--max-tokens 64] [--threads 1] [--context 4096] [--first-token]

With --first-token, it prints the seconds from the start of the loading to the first token.
"""
import argparse
import json
import time

try:
    import llama_cpp
    import numpy
except ImportError:
    llama_cpp = None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to write [64]")
    parser.add_argument("--threads", type=int, default=1, help="threads of llama.cpp [1]")
    parser.add_argument("--context", type=int, default=4096, help="tokens that the cache has room for [4096]")
    parser.add_argument("--first-token", action="store_true", help="write one token, and print the seconds until then")
    args = parser.parse_args()
    if args.first_token:
        print(json.dumps(first_token(args)))
        return
    if args.max_tokens < 2 or args.threads < 1:
        parser.error("give at least 2 for --max-tokens and 1 for --threads")
    print(json.dumps(with_llama_cpp(args) if llama_cpp else with_xllamacpp(args)))


def server(args):
    """The server of llama.cpp in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_ctx, params.n_batch, params.n_parallel = args.context, 512, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.warmup = not args.first_token
    return xllamacpp.Server(params)


def first_token(args):
    import xllamacpp  # noqa: F401, it is not a part of what is measured

    began = time.perf_counter()
    server(args).handle_completions({"prompt": args.prompt, "max_tokens": 1, "temperature": 0})
    return {"first_token_s": time.perf_counter() - began}


def with_xllamacpp(args):
    """The times that the server tells."""
    task = {"prompt": args.prompt, "max_tokens": args.max_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    times = server(args).handle_completions(task)["timings"]
    return {"prompt_tokens_per_s": times["prompt_per_second"], "tokens_per_s": times["predicted_per_second"]}


def with_llama_cpp(args):
    model = llama_cpp.Llama(
        args.model,
        n_ctx=args.context,
        n_batch=512,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        n_gpu_layers=0,
        logits_all=False,
        verbose=False,
    )
    prompt = model.tokenize(args.prompt.encode(), add_bos=False)
    tokens, given, first = [], prompt, 0.0
    began = time.perf_counter()
    for i in range(args.max_tokens):
        model.eval(given)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        token = int(numpy.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())
        if i == 0:
            first = time.perf_counter() - began
        tokens.append(token)
        given = [token]
    rest = time.perf_counter() - began - first
    speeds = {"prompt_tokens_per_s": len(prompt) / first, "tokens_per_s": (args.max_tokens - 1) / rest}
    return {"tokens": tokens, **speeds}


if __name__ == "__main__":
    main()
