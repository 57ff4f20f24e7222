#!/usr/bin/env python3
"""Measures the dispatch of PyTorch's DTensor in the same way as bench-dispatch, and prints the same JSON.

Usage: python3 benchmarks/peers/dtensor_dispatch.py [--batches 15] [--calls 200]

One process is one rank of a world whose collectives do nothing. Tensors are 8 x 8 f32 on one thread. A number is the
nanoseconds that the distributed op needs more than the plain one; "first" is for new shapes.
"""
import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZE = 8
S0, S1, R = Shard(0), Shard(1), Replicate()


def last(x, placement):
    return [*x.placements[:-1], placement]


def gathered(x, mesh):
    return torch.cat([x[0], x[0]])


# name, placement of the inputs on the last axis, the distributed op, the plain op on the shards
CASES = [
    ("add", (S0, S0), lambda x: x[0] + x[1], lambda x, mesh: x[0] + x[1]),
    ("mul_scalar", (S0,), lambda x: x[0] * 2.0, lambda x, mesh: x[0] * 2.0),
    ("relu", (S0,), lambda x: x[0].relu(), lambda x, mesh: x[0].relu()),
    ("matmul_s0_r", (S0, R), lambda x: x[0] @ x[1], lambda x, mesh: x[0] @ x[1]),
    ("matmul_r_s1", (R, S1), lambda x: x[0] @ x[1], lambda x, mesh: x[0] @ x[1]),
    ("sum", (S0,), lambda x: x[0].sum(), lambda x, mesh: x[0].sum()),
    (
        "reshape",
        (S0,),
        lambda x: x[0].reshape(x[0].shape[0], 2, x[0].shape[1] // 2),
        lambda x, mesh: x[0].reshape(x[0].shape[0], 2, x[0].shape[1] // 2),
    ),
    ("transpose", (S0,), lambda x: x[0].transpose(0, 1), lambda x, mesh: x[0].transpose(0, 1)),
    ("redistribute_nothing", (S0,), lambda x: x[0].redistribute(placements=x[0].placements), lambda x, mesh: x[0]),
    ("redistribute_s0_r", (S0,), lambda x: x[0].redistribute(placements=last(x[0], R)), gathered),
    (
        "redistribute_r_s0",
        (R,),
        lambda x: x[0].redistribute(placements=last(x[0], S0)),
        lambda x, mesh: x[0].narrow(0, 0, x[0].shape[0] // 2).clone(),
    ),
    ("redistribute_s0_s1", (S0,), lambda x: x[0].redistribute(placements=last(x[0], S1)), gathered),
]


def inputs(case, mesh, rows, columns):
    name, placements, *_ = case
    made = []
    for i, placement in enumerate(placements):
        shape = (columns, rows) if name.startswith("matmul") and i == 1 else (rows, columns)
        outer = S0 if placement == R and i == 0 else R
        lies = [outer] * (mesh.ndim - 1) + [placement]
        made.append(distribute_tensor(torch.ones(shape), mesh, lies))
    return made, [x.to_local() for x in made]


def mean_ns(calls, call):
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / calls


def row(case, mesh, batches, calls):
    name, _, distributed, plain = case
    given, local = inputs(case, mesh, SIZE, SIZE)
    bare, warm = [], []
    for batch in range(batches + 1):
        times = mean_ns(calls, lambda: plain(local, mesh)), mean_ns(calls, lambda: distributed(given))
        if batch > 0:
            bare.append(times[0])
            warm.append(times[1])
    first, first_plain = [], []
    for i in range(21):
        given, local = inputs(case, mesh, SIZE, SIZE + 8 * (i + 1))
        first_plain.append(mean_ns(1, lambda: plain(local, mesh)))
        first.append(mean_ns(1, lambda: distributed(given)))
    plain_ns = statistics.median(bare)
    return {
        "op": name,
        "axes": mesh.ndim,
        "plain_ns": plain_ns,
        "warm_ns": statistics.median(warm) - plain_ns,
        "first_ns": statistics.median(first) - statistics.median(first_plain),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for names, shape in [(("tp",), (2,)), (("dp", "tp"), (2, 2))]:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2 ** len(shape))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with torch.no_grad():
            rows += [row(case, mesh, args.batches, args.calls) for case in CASES]
        dist.destroy_process_group()
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
