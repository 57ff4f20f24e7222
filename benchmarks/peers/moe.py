#!/usr/bin/env python3
"""Measures a mixture of experts on one device in PyTorch in the same way as bench-moe, and prints similar JSON.

Usage: moe.py [--tokens 2048] [--width 256] [--hidden 512] [--experts 16] [--top-k 2] [--threads 2] [--rounds 5]

Two loops over experts: "dense" computes all tokens with each expert and multiplies most results by zero, "selected"
computes the tokens that chose the expert, as transformers does. A row is the median milliseconds of a forward and a
backward pass. Tokens are drawn from the same distributions as in bench-moe, not with the same numbers.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F


def selected(x, chosen, weights, gate, up, down):
    out = torch.zeros_like(x)
    for expert in range(gate.size(0)):
        token, slot = torch.where(chosen == expert)
        if token.numel() == 0:
            continue
        rows = x[token]
        made = F.linear(F.silu(F.linear(rows, gate[expert])) * F.linear(rows, up[expert]), down[expert])
        out = out.index_add(0, token, made * weights[token, slot, None])
    return out


def dense(x, chosen, weights, gate, up, down):
    out = torch.zeros_like(x)
    for expert in range(gate.size(0)):
        weight = (weights * (chosen == expert)).sum(1, keepdim=True)
        out = out + F.linear(F.silu(F.linear(x, gate[expert])) * F.linear(x, up[expert]), down[expert]) * weight
    return out


def tokens(args, routing):
    """Returns tokens whose first columns are logits: Gumbel noise, and for zipf the logarithms of the frequencies."""
    noise = -torch.log(-torch.log(torch.rand(args.tokens, args.experts).clamp(min=1e-6, max=1 - 1e-7)))
    if routing == "zipf":
        noise = noise - torch.arange(1, args.experts + 1).log()
    return torch.cat([noise, torch.rand(args.tokens, args.width - args.experts) * 2 - 1], 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"tokens": 2048, "width": 256, "hidden": 512, "experts": 16, "top-k": 2, "threads": 2, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)

    def parameter(out, into):
        return torch.empty(args.experts, out, into).uniform_(-(into**-0.5), into**-0.5).requires_grad_()

    experts = [parameter(args.hidden, args.width), parameter(args.hidden, args.width), parameter(args.width, args.hidden)]
    router = torch.eye(args.experts, args.width).requires_grad_()
    rows = []
    for routing in ("uniform", "zipf"):
        x = tokens(args, routing).requires_grad_()
        for loop in (selected, dense):
            times = []
            for _ in range(args.rounds + 1):
                began = time.perf_counter()
                weights, chosen = F.linear(x, router).softmax(1).topk(args.top_k)
                loop(x, chosen, weights / weights.sum(1, keepdim=True), *experts).sum().backward()
                times.append((time.perf_counter() - began) * 1e3)
                for leaf in (x, router, *experts):
                    leaf.grad = None
            rows.append({"loop": loop.__name__, "routing": routing, "ms": statistics.median(times[1:])})
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
