#!/usr/bin/env python3
"""Writes the orders of PyTorch's schedules into candle-pipe/tests/suite/schedules/facts.json.

Usage: PYTHON benchmarks/schedule_facts.py, with a Python that has torch

For each schedule, number of stages per rank and number of ranks, it writes a row [microbatches, order, lowered] per
number of microbatches that PyTorch accepts. Both hashes (64-bit FNV-1a, in hex) are of a text with one line per rank,
its actions separated by commas: the computations, and the computations with PyTorch's sends and receives. Idle steps
are left out.

Two schedules are also written in full, into computed.csv and lowered.csv, in PyTorch's two formats.

GPipe and 1F1B are run with a stage that records its calls, because PyTorch's list for 1F1B has other microbatches than
its run. PyTorch does not lower them, so their second hash is that of the lowering of the recorded order.
"""
import copy
import json
from types import SimpleNamespace

from torch.distributed.pipelining import schedules

from side_by_side import ROOT, say

FOLDER = ROOT / "candle-pipe" / "tests" / "suite" / "schedules"
RANKS = range(1, 9)
MICROBATCHES = range(1, 33)
# The names of this project, PyTorch's classes, and the numbers of stages per rank.
SINGLE = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
MULTI = {
    "looped-bfs": (schedules.ScheduleLoopedBFS, [1, 2, 3]),
    "interleaved-1f1b": (schedules.ScheduleInterleaved1F1B, [1, 2, 3]),
    "interleaved-zb": (schedules.ScheduleInterleavedZeroBubble, [1, 2, 3]),
    "zbv": (schedules.ScheduleZBVZeroBubble, [2]),
    "dualpipev": (schedules.ScheduleDualPipeV, [2]),
}


class Recorder:
    """A stage that computes nothing and records its calls."""

    def __init__(self, stage, stages):
        self.stage_index, self.num_stages, self.submod = stage, stages, None
        self.is_first, self.is_last, self.has_backward = stage == 0, stage == stages - 1, True
        self.group_size, self.group_rank = stages, stage
        self.told = []

    def forward_one_chunk(self, microbatch, *_args, **_kwargs):
        self.told.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **_kwargs):
        self.told.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name):
        # All communication is empty.
        return lambda *_args, **_kwargs: []


def eager(cls, ranks, microbatches):
    orders = {}
    for rank in range(ranks):
        stage = Recorder(rank, ranks)
        schedule = cls(stage, microbatches)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        orders[rank] = [schedules._Action.from_str(action) for action in stage.told]
    return orders


def made(cls, ranks, microbatches, local):
    stages = [
        SimpleNamespace(
            stage_index=i * ranks, num_stages=ranks * local, group_size=ranks, group_rank=0, submod=None,
            is_first=i == 0, is_last=i == ranks * local - 1, has_backward=True, stage_index_to_group_rank={},
        )
        for i in range(local)
    ]
    return cls(stages, microbatches)


def listed(cls, ranks, microbatches, local):
    schedule = made(cls, ranks, microbatches, local)
    orders = {r: [a for a in schedule.pipeline_order[r] if a is not None] for r in range(ranks)}
    return orders, schedule.stage_index_to_group_rank


def lowered(orders, stage_ranks):
    return schedules._add_send_recv(copy.deepcopy(orders), lambda stage: stage_ranks[stage], len(stage_ranks))


def text(orders):
    return "".join(",".join(map(str, orders[rank])) + "\n" for rank in sorted(orders))


def fnv(words):
    hashed = 0xCBF29CE484222325
    for byte in words.encode():
        hashed = (hashed ^ byte) * 0x100000001B3 % 2**64
    return f"{hashed:x}"


def row(microbatches, orders, stage_ranks):
    return [microbatches, fnv(text(orders)), fnv(text(lowered(orders, stage_ranks)))]


def rows(name, local, ranks):
    found = []
    for microbatches in MICROBATCHES:
        try:
            if name in SINGLE:
                orders, stage_ranks = eager(SINGLE[name], ranks, microbatches), {r: r for r in range(ranks)}
            else:
                orders, stage_ranks = listed(MULTI[name][0], ranks, microbatches, local)
        except ValueError:
            continue  # PyTorch does not accept this number of microbatches.
        found.append(row(microbatches, orders, stage_ranks))
    return found


def main():
    kinds = [(name, 1) for name in SINGLE] + [(name, local) for name, (_, all) in MULTI.items() for local in all]
    facts = []
    for name, local in kinds:
        for ranks in RANKS:
            facts.append(dict(schedule=name, stages_per_rank=local, ranks=ranks, rows=rows(name, local, ranks)))
        say(f"{name}, {local} stages per rank: {sum(len(fact['rows']) for fact in facts)} orders so far")
    body = ",\n".join(json.dumps(fact, separators=(",", ":")) for fact in facts)
    file = FOLDER / "facts.json"
    file.write_text(f"[\n{body}\n]\n")
    say(f"{file.stat().st_size:,} bytes: {file}")
    made(schedules.ScheduleInterleavedZeroBubble, 2, 3, 2)._dump_csv(FOLDER / "computed.csv", "compute_only")
    made(schedules.ScheduleDualPipeV, 2, 5, 2)._dump_csv(FOLDER / "lowered.csv", "compute_comms")


if __name__ == "__main__":
    main()
