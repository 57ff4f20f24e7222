#!/usr/bin/env python3
"""Measures torch.distributed over Gloo in the same way as bench-collectives, and prints the same JSON object.

Usage: gloo.py --world N [--sizes BYTES ...]

Every rank is a process that times its own call after a barrier. A row is the median over the rounds of the slowest
rank's time. send_recv is half a ping-pong of ranks 0 and 1. Results go to tensors that have been used before. The input
of an all_reduce, which works in place, is copied in before the barrier.
"""
import argparse
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WARM_UP, BUDGET_US, MIN_ROUNDS, MAX_ROUNDS = 5, 1e6, 7, 2001
SIZES = [4 << 10, 256 << 10, 4 << 20, 64 << 20]
ELEMENT_BYTES = 4


def values(rank, length):
    """Returns a rank's input: small whole numbers whose sums are exact in f32."""
    return ((torch.arange(length) % 251 + 1) * (rank + 1)).float()


class Case:
    """One op at one size: the preparation before the barrier, the timed call, and the expected result."""

    def __init__(self, op, length, rank, world):
        self.rank, self.world, self.length = rank, world, length
        self.input = values(rank, length)
        lengths = {"all_gather": length * world, "reduce_scatter": length // world}
        self.output = torch.zeros(lengths.get(op, length))
        self.call = getattr(self, op)
        self.in_place = op == "all_reduce" or (op == "broadcast" and rank == 0)
        self.expected = getattr(self, f"{op}_gives")

    def prepare(self):
        if self.in_place:
            self.output.copy_(self.input)

    def check(self):
        expected = self.expected()
        assert expected is None or torch.equal(self.output, expected), f"rank {self.rank}: wrong data"

    def all_reduce(self):
        dist.all_reduce(self.output)

    def all_reduce_gives(self):
        return sum(values(rank, self.length) for rank in range(self.world))

    def all_gather(self):
        dist.all_gather_into_tensor(self.output, self.input)

    def all_gather_gives(self):
        return torch.cat([values(rank, self.length) for rank in range(self.world)])

    def reduce_scatter(self):
        dist.reduce_scatter_tensor(self.output, self.input)

    def reduce_scatter_gives(self):
        return self.all_reduce_gives().chunk(self.world)[self.rank]

    def all_to_all(self):
        dist.all_to_all_single(self.output, self.input)

    def all_to_all_gives(self):
        return torch.cat([values(rank, self.length).chunk(self.world)[self.rank] for rank in range(self.world)])

    def broadcast(self):
        dist.broadcast(self.output, 0)

    def broadcast_gives(self):
        return values(0, self.length)

    def send_recv(self):
        if self.rank == 0:
            dist.send(self.input, 1)
            dist.recv(self.output, 1)
        elif self.rank == 1:
            dist.recv(self.output, 0)
            dist.send(self.input, 0)

    def send_recv_gives(self):
        return values(1 - self.rank, self.length) if self.rank < 2 else None


OPS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]


def timed(case):
    """Returns the microseconds of one call on this rank, after a barrier."""
    case.prepare()
    dist.barrier()
    start = time.perf_counter()
    case.call()
    return (time.perf_counter() - start) * 1e6


def median(times):
    return sorted(times)[len(times) // 2]


def row(case):
    """Returns the median microseconds of one row, and its number of rounds."""
    case.prepare()
    case.call()
    case.check()
    fit = BUDGET_US / median([timed(case) for _ in range(WARM_UP)])
    rounds = torch.tensor(int(min(max(fit, MIN_ROUNDS), MAX_ROUNDS)))
    dist.broadcast(rounds, 0)
    slowest = torch.tensor([timed(case) for _ in range(int(rounds))], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return median(slowest.tolist()), len(slowest)


def run(rank, world, sizes, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    rows = []
    for op in OPS if world > 1 else OPS[:-1]:
        for size in sizes:
            us, rounds = row(Case(op, size // ELEMENT_BYTES, rank, world))
            median_us = us / 2 if op == "send_recv" else us
            rows.append({"op": op, "bytes": size, "median_us": round(median_us, 3), "rounds": rounds})
    if rank == 0:
        print(json.dumps({"world": world, "rows": rows}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="number of processes")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of each rank's input")
    args = parser.parse_args()
    if args.world < 1 or any(size <= 0 or size % (ELEMENT_BYTES * args.world) for size in args.sizes):
        parser.error("give at least 1 process, and sizes with a whole number of f32 for each of them")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (args.world, args.sizes, os.path.join(folder, "rendezvous"))
        mp.start_processes(run, arguments, nprocs=args.world, start_method="spawn")


if __name__ == "__main__":
    main()
