#!/usr/bin/env python3
"""Writes the steps of PyTorch's optimizers on one device into candle-shard/tests/suite/optimizer/facts.json.

Usage: PYTHON benchmarks/optimizer_facts.py, with a Python that has torch

A case has the options, a parameter, the gradient of each step (null if there is none), and the parameter after each
step.
Parameters and gradients are eighths drawn from the name of the case, in f64. Muon's iterations are bf16. The cases with
"dtype": "f64" run the same source with that dtype, so that they can be compared closely.
"""
import inspect
import json
import random

import torch
from torch.optim import _muon

from embedding_facts import eighths
from side_by_side import ROOT, say

FILE = ROOT / "candle-shard" / "tests" / "suite" / "optimizer" / "facts.json"
MATRICES = [(5, 3), (3, 5), (4, 4), (1, 7)]

CASES = [
    ("SGD", dict(lr=0.1)),
    ("SGD", dict(lr=0.1, weight_decay=0.03)),
    ("SGD", dict(lr=0.1, momentum=0.9)),
    ("SGD", dict(lr=0.1, momentum=0.9, dampening=0.25, weight_decay=0.03)),
    ("SGD", dict(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.03)),
    ("Adagrad", dict(lr=0.1)),
    ("Adagrad", dict(lr=0.1, lr_decay=0.25, weight_decay=0.03, initial_accumulator_value=0.5, eps=1e-3)),
    ("AdamW", dict(lr=0.1)),
    ("AdamW", dict(lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)),
]
MUON = [
    dict(lr=0.1),
    dict(lr=0.1, nesterov=False, momentum=0.8, weight_decay=0.0),
    dict(lr=0.1, ns_coefficients=(2.0, -1.5, 0.5), ns_steps=8, eps=1e-3),
    dict(lr=0.1, adjust_lr_fn="match_rms_adamw"),
    dict(lr=0.1, adjust_lr_fn="spectral_unclamped"),
]


def fact(name, kind, options, shape, present, dtype=None):
    """Returns one case with PyTorch's results."""
    draw = random.Random(name)
    start = eighths(draw, shape)
    parameter = start.clone().requires_grad_()
    optimizer = getattr(torch.optim, kind)([parameter], **options)
    grads, after = [], []
    for is_there in present:
        parameter.grad = eighths(draw, shape) if is_there else None
        grads.append(parameter.grad.tolist() if is_there else None)
        optimizer.step()
        after.append(parameter.tolist())
    return {
        "name": name, "optimizer": kind, "options": options, "dtype": dtype, "start": start.tolist(), "grads": grads, "after": after,
    }


def main():
    facts = []
    for kind, options in CASES:
        for shape, present in [((5, 3), [True] * 4), ((6,), [False, True, False, True, True])]:
            facts.append(fact(f"{kind} {options} {shape}", kind, options, shape, present))
    rounded = _muon._zeropower_via_newtonschulz
    source = inspect.getsource(rounded).replace("torch.bfloat16", "torch.float64")
    namespace = dict(vars(_muon))
    exec(source, namespace)
    for dtype, iterate in [("bf16", rounded), ("f64", namespace[rounded.__name__])]:
        _muon._zeropower_via_newtonschulz = iterate
        for options in MUON:
            for shape in MATRICES:
                facts.append(fact(f"Muon {dtype} {options} {shape}", "Muon", options, shape, [True, False, True, True], dtype))
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, facts)) + "\n]\n")
    say(f"{len(facts)} cases, {FILE.stat().st_size:,} bytes: {FILE}")


if __name__ == "__main__":
    main()
