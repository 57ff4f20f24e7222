#!/usr/bin/env python3
"""Writes PyTorch's results for small embeddings on one device into candle-shard/tests/suite/embedding/facts.json.

Usage: PYTHON benchmarks/embedding_facts.py, with a Python that has torch

A case has the inputs of one call, the upstream gradient g, and the results: the output, the weight afterwards (max_norm
writes to it), and the gradients of sum(output * g). Inputs are eighths drawn from the name of the case, so a new case
does not change the others. All numbers are f64, with enough digits to read the same numbers back.
"""
import json
import math
import random

import torch
import torch.nn.functional as F

from side_by_side import ROOT, say

FILE = ROOT / "candle-shard" / "tests" / "suite" / "embedding" / "facts.json"
NORMS = [0.5, 1.0, 2.0, 3.0, math.inf]
MODES = ["sum", "mean", "max"]
# Half of the rows that are looked up have a norm above max_norm.
HALF = "half"

ROW = [3, 0, 6, 3, 1]
GRID = [[0, 5, 2], [6, 2, 4]]
CUBE = [[[1, 2], [0, 6]], [[6, 6], [4, 3]], [[5, 1], [2, 0]]]
# Some bags are empty: the first, one in the middle, the last. Some contain only id 2, which is the padding below.
FLAT = dict(ids=[4, 2, 2, 0, 5, 2, 6, 1], offsets=[0, 0, 3, 3, 5, 6, 8])
LAST = dict(FLAT, offsets=[*FLAT["offsets"], 8], include_last_offset=True)
BAGS = dict(ids=[[4, 2, 0], [2, 2, 2], [6, 2, 5], [1, 1, 3]])
EMPTY = dict(ids=[], offsets=[0, 0])

EMBEDDING = [
    ("1-D", dict(ids=ROW)),
    ("2-D", dict(ids=GRID)),
    ("3-D", dict(ids=CUBE)),
    ("wide", dict(ids=[10, 3, 0, 9, 9], shape=(11, 4))),
    ("one row", dict(ids=[0, 0], shape=(1, 2))),
    ("one column", dict(ids=GRID, shape=(7, 1))),
    ("no ids", dict(ids=[])),
    ("no ids in 2-D", dict(ids=[[], []])),
    ("no ids, max_norm", dict(ids=[], max_norm=0.5)),
    ("padding_idx first", dict(ids=ROW, padding_idx=0)),
    ("padding_idx middle", dict(ids=ROW, padding_idx=3)),
    ("padding_idx last", dict(ids=CUBE, padding_idx=6)),
    ("padding_idx -1", dict(ids=GRID, padding_idx=-1)),
    ("padding_idx -7", dict(ids=GRID, padding_idx=-7)),
    ("padding_idx not looked up", dict(ids=[0, 2, 2], padding_idx=5)),
    ("padding only", dict(ids=[4, 4, 4], padding_idx=4)),
    *((f"max_norm p {p}", dict(ids=ROW, max_norm=HALF, norm_type=p)) for p in NORMS),
    *((f"max_norm p {p}, padding_idx -5", dict(ids=GRID, max_norm=HALF, norm_type=p, padding_idx=-5)) for p in NORMS),
    ("max_norm 3-D", dict(ids=CUBE, max_norm=HALF, shape=(11, 4))),
    ("max_norm above all", dict(ids=ROW, max_norm=100.0)),
    ("max_norm below all", dict(ids=ROW, max_norm=0.01)),
    (
        "max_norm reached",
        dict(ids=[0, 1, 2], max_norm=2.0, norm_type=1.0, weight=[[1.5, -0.5], [2.0, 0.125], [0.0, 2.0]]),
    ),
    ("max_norm row of zeros", dict(ids=[0, 1, 1], max_norm=0.5, weight=[[0.0, 0.0], [0.25, -1.0], [3.0, 4.0]])),
    (
        "max_norm padding too long",
        dict(ids=[2, 0], max_norm=1.0, padding_idx=2, weight=[[3.0, 4.0], [5.0, 0.0], [0.0, -7.0]]),
    ),
]

BAG = [
    *((f"{mode} 1-D", dict(FLAT, mode=mode)) for mode in MODES),
    *((f"{mode} include_last_offset", dict(LAST, mode=mode)) for mode in MODES),
    *((f"{mode} 2-D", dict(BAGS, mode=mode)) for mode in MODES),
    *((f"{mode} padding_idx", dict(FLAT, mode=mode, padding_idx=2)) for mode in MODES),
    *((f"{mode} padding_idx negative", dict(FLAT, mode=mode, padding_idx=-5)) for mode in MODES),
    *((f"{mode} 2-D padding_idx", dict(BAGS, mode=mode, padding_idx=2)) for mode in MODES),
    *((f"{mode} empty bags only", dict(EMPTY, mode=mode)) for mode in MODES),
    ("sum weights 1-D", dict(FLAT, mode="sum", weighted=True)),
    ("sum weights include_last_offset", dict(LAST, mode="sum", weighted=True)),
    ("sum weights 2-D", dict(BAGS, mode="sum", weighted=True)),
    ("sum weights padding_idx", dict(FLAT, mode="sum", weighted=True, padding_idx=2)),
    ("sum weights 2-D padding_idx negative", dict(BAGS, mode="sum", weighted=True, padding_idx=-5)),
    ("sum weights max_norm", dict(FLAT, mode="sum", weighted=True, max_norm=HALF)),
    ("max tie of one id", dict(ids=[1, 1, 0, 0, 0], offsets=[0, 2], mode="max", shape=(3, 2))),
    ("max tie of two ids", dict(ids=[2, 0, 0, 2], offsets=[0, 2], mode="max", weight=[[1.0, 0.5], [2.0, 2.0], [1.0, 0.5]])),
    ("max tie 2-D", dict(ids=[[0, 1, 2], [2, 1, 0]], mode="max", weight=[[1.0, -0.5], [1.0, -0.5], [0.5, -0.5]])),
    (
        "max tie with padding_idx",
        dict(ids=[[0, 1, 2], [2, 1, 0]], mode="max", padding_idx=0, weight=[[1.0, -0.5], [1.0, -0.5], [1.0, -0.75]]),
    ),
    *((f"sum max_norm p {p}", dict(FLAT, mode="sum", max_norm=HALF, norm_type=p)) for p in NORMS),
    *((f"{mode} 2-D max_norm", dict(BAGS, mode=mode, max_norm=HALF)) for mode in MODES),
    *((f"{mode} max_norm padding_idx", dict(FLAT, mode=mode, max_norm=HALF, padding_idx=2)) for mode in MODES),
]


def eighths(draw, shape):
    """Returns a tensor of nonzero eighths between -3 and 3."""
    count = math.prod(shape)
    values = [draw.choice([-1, 1]) * draw.randint(1, 24) / 8 for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def middle(weight, ids, norm_type):
    """Returns a max_norm between the norms of the rows that are looked up."""
    norms = torch.linalg.vector_norm(weight[ids.unique()], norm_type, dim=1).unique()
    half = len(norms) // 2
    return round((norms[half - 1] + norms[half]).item() / 2, 3)


def fact(op, name, ids, weight=None, shape=(7, 3), offsets=None, weighted=False, max_norm=None, norm_type=2.0, **options):
    """Returns one case with PyTorch's results."""
    draw = random.Random(f"{op} {name}")
    before = eighths(draw, shape) if weight is None else torch.tensor(weight, dtype=torch.float64)
    ids = torch.tensor(ids, dtype=torch.int64)
    if max_norm == HALF:
        max_norm = middle(before, ids, norm_type)
    given = {"max_norm": max_norm, "norm_type": norm_type, **options}
    if op == "embedding_bag":
        given["offsets"] = None if offsets is None else torch.tensor(offsets)
        given["per_sample_weights"] = eighths(draw, ids.shape).requires_grad_() if weighted else None
    after = before.clone().requires_grad_()
    output = getattr(F, op)(ids, after, **given)
    g = eighths(draw, output.shape)
    (output * g).sum().backward()
    weights = given.get("per_sample_weights")
    return {
        "name": name,
        "op": op,
        "weight": before.tolist(),
        "ids": ids.tolist(),
        "offsets": offsets,
        "mode": options.get("mode"),
        "include_last_offset": options.get("include_last_offset", False),
        "padding_idx": options.get("padding_idx"),
        "max_norm": max_norm,
        "norm_type": "inf" if math.isinf(norm_type) else norm_type,
        "per_sample_weights": weights.tolist() if weighted else None,
        "g": g.tolist(),
        "output": output.tolist(),
        "weight_after": after.tolist(),
        "weight_grad": after.grad.tolist(),
        "weights_grad": weights.grad.tolist() if weighted else None,
    }


def main():
    facts = [fact("embedding", name, **given) for name, given in EMBEDDING]
    facts += [fact("embedding_bag", name, **given) for name, given in BAG]
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, facts)) + "\n]\n")
    say(f"{len(facts)} cases, {FILE.stat().st_size:,} bytes: {FILE}")


if __name__ == "__main__":
    main()
