#!/usr/bin/env python3
"""Measures PyTorch's sharded embedding in the same way as bench-embedding, and prints the same JSON.

Usage: sharded_embedding.py [--vocab 10000] [--dim 64] [--ids 4096] [--world 2]

Every rank is a process that times its own call after a barrier. A row is the median over the rounds of the slowest
rank's milliseconds. "forward" is the lookup; "step" is the lookup, its backward pass and SGD on the local shard. Each
rank draws new ids in each round. With max_norm, about half of the rows are too long, and the table is restored before
each call. A row that PyTorch does not support has null and a note.
"""
import argparse
import json
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

WARM_UP, BUDGET_MS, MIN_ROUNDS, MAX_ROUNDS = 3, 2e3, 7, 501
SHARDINGS = {"row": 0, "column": 1}
REPLACED = "the op replaces the optimizer's parameter by a tensor with a graph, so a second step fails"


class Table:
    """One sharded table with its optimizer, and the ids that this rank looks up."""

    def __init__(self, whole, sharding, limited, ids, rank, world):
        # Measured on a few rows, which are the same on every rank.
        self.max_norm = whole[:1000].norm(dim=1).median().item() if limited else None
        self.vocab, self.count = whole.size(0), ids
        self.draw = torch.Generator().manual_seed(1 + rank)
        dim = SHARDINGS[sharding]
        self.start = whole.chunk(world, dim)[rank]
        self.shard = self.start.clone(memory_format=torch.contiguous_format).requires_grad_()
        spec = ChunkShardingSpec(dim, [f"rank:{i}/cpu" for i in range(world)])
        self.table = ShardedTensor._init_from_local_tensor(self.shard, spec, whole.size())
        self.optimizer = torch.optim.SGD([self.shard], lr=1e-3)
        self.upstream = torch.ones(ids, whole.size(1))

    def prepare(self):
        self.ids = torch.randint(self.vocab, (self.count,), generator=self.draw)
        if self.max_norm is not None:
            self.table.local_shards()[0].tensor = self.shard
            with torch.no_grad():
                self.shard.copy_(self.start)

    def forward(self):
        return F.embedding(self.ids, self.table, max_norm=self.max_norm)

    def step(self):
        self.optimizer.zero_grad()
        self.forward().backward(self.upstream)
        self.optimizer.step()

    def check(self, whole):
        self.prepare()
        expected = F.embedding(self.ids, whole.clone(), max_norm=self.max_norm)
        torch.testing.assert_close(self.forward(), expected)

    def keeps_parameter(self):
        self.prepare()
        self.step()
        return self.table.local_tensor() is self.shard


def timed(case, call):
    """Returns the milliseconds of one call on this rank, after a barrier."""
    case.prepare()
    dist.barrier()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def median(times):
    return sorted(times)[len(times) // 2]


def median_ms(case, call):
    fit = BUDGET_MS / median([timed(case, call) for _ in range(WARM_UP)])
    rounds = torch.tensor(int(min(max(fit, MIN_ROUNDS), MAX_ROUNDS)))
    dist.broadcast(rounds, 0)
    slowest = torch.tensor([timed(case, call) for _ in range(int(rounds))], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(median(slowest.tolist()), 3)


def rows(whole, ids, rank, world):
    for sharding in SHARDINGS:
        for limited in (False, True):
            case = Table(whole, sharding, limited, ids, rank, world)
            case.check(whole)
            row = {"vocab": whole.size(0), "sharding": sharding, "max_norm": limited}
            yield {**row, "phase": "forward", "ms": median_ms(case, case.forward)}
            if case.keeps_parameter():
                yield {**row, "phase": "step", "ms": median_ms(case, case.step)}
            else:
                yield {**row, "phase": "step", "ms": None, "note": REPLACED}


def run(rank, args, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.world)
    whole = torch.randn(args.vocab, args.dim, generator=torch.Generator().manual_seed(0))
    measured = list(rows(whole, args.ids, rank, args.world))
    if rank == 0:
        print(json.dumps({"world": args.world, "rows": measured}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    helps = {"vocab": "rows of the table", "dim": "its columns", "ids": "ids of each rank", "world": "number of processes"}
    for name, default in (("vocab", 10_000), ("dim", 64), ("ids", 4096), ("world", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{helps[name]} [{default}]")
    args = parser.parse_args()
    if min(vars(args).values()) < 1 or args.vocab % args.world or args.dim % args.world:
        parser.error("give at least 1 of each, and a --vocab and a --dim that divide by --world")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (args, f"{folder}/rendezvous"), nprocs=args.world, start_method="spawn")


if __name__ == "__main__":
    main()
