#!/usr/bin/env python3
"""Serves a GGUF file with llama.cpp's server (the Python package xllamacpp), and prints its address.

Usage: PYTHON benchmarks/peers/llamacpp_server.py --model FILE [--threads 2] [--slots 16] [--room 2048]
"""
import argparse
import time

import xllamacpp


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--room", type=int, default=2048, help="tokens of a text")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.n_ctx, params.n_parallel, params.port = args.room * args.slots, args.slots, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
