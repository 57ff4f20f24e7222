#!/usr/bin/env python3
"""Measures PyTorch's causal scaled_dot_product_attention on the CPU, and prints one JSON object.

Usage: PYTHON benchmarks/peers/attention.py [--length 4096] [--heads 8] [--kv-heads 8] [--dim 64] [--dtype f32] [--window N]
       [--threads 1] [--rounds 5]

Query, key and value are [1, heads, length, dim], contiguous. The backward pass starts at the sum of the result. A number is the median of the
milliseconds of the rounds after one that warms up. PyTorch has no windows, so a window is a mask of all pairs.
"""
import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--window", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    def drawn(heads):
        whole = torch.rand(1, heads, args.length, args.dim) * 2 - 1
        return whole.to(DTYPES[args.dtype]).requires_grad_()

    query, key, value = drawn(args.heads), drawn(args.kv_heads), drawn(args.kv_heads)
    causal = dict(is_causal=True)
    if args.window:
        back = torch.arange(args.length)[:, None] - torch.arange(args.length)
        causal = dict(attn_mask=(back >= 0) & (back < args.window))
    times = {"forward": [], "backward": []}
    for round in range(args.rounds + 1):
        began = time.perf_counter()
        made = scaled_dot_product_attention(query, key, value, enable_gqa=args.heads != args.kv_heads, **causal)
        loss = made.sum()
        forward = time.perf_counter()
        loss.backward()
        done = time.perf_counter()
        query.grad = key.grad = value.grad = None
        if round:
            times["forward"].append(forward - began)
            times["backward"].append(done - forward)
    rows = [dict(phase=phase, ms=1e3 * statistics.median(series)) for phase, series in times.items()]
    print(json.dumps(dict(torch=torch.__version__, rows=rows)))


if __name__ == "__main__":
    main()
