#!/usr/bin/env python3
"""Compares sharded embeddings with PyTorch's as the vocabulary grows, and writes the table into benchmarks/results.

Usage: python3 benchmarks/embedding.py [--vocabs 10000 100000 1000000] [--dim 64] [--ids 4096] [--repeats 3]
           [--torch-python PYTHON] [--dry-run]

It builds bench-embedding and then runs the two alternately on 2 ranks. Each number is the median of its runs. Without a
Python that has torch (--torch-python, or TORCH_PYTHON in the environment), only ours is measured. Nothing else should
run.
"""
import argparse
import datetime
import os
import statistics
import sys

from side_by_side import PEERS, build, has, output, rewrite, say

OURS, PEER = "ours", "PyTorch"


def measure(sides, args):
    """Returns the median milliseconds by (sharding, max_norm, phase, vocab) and side, and notes on missing numbers."""
    runs, notes = {}, {}
    for repeat in range(args.repeats):
        for vocab in args.vocabs:
            size = ["--vocab", str(vocab), "--dim", str(args.dim), "--ids", str(args.ids)]
            for name, command in sides.items():
                say(f"repeat {repeat + 1} of {args.repeats}, vocabulary {vocab:,}: {name}")
                for row in output([*command, *size])["rows"]:
                    key = (row["sharding"], row["max_norm"], row["phase"], vocab)
                    if row["ms"] is None:
                        notes[f"{name}, {label(*key[:3])}: {row['note']}."] = None
                    else:
                        runs.setdefault(key, {}).setdefault(name, []).append(row["ms"])
    times = {key: {name: statistics.median(ms) for name, ms in by_side.items()} for key, by_side in runs.items()}
    return times, list(notes)


def label(sharding, limited, phase):
    return f"{sharding}-wise{' with max_norm' if limited else ''}, {phase}"


def number(ms):
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.2f}"


def table(times, vocabs, sides):
    """Returns the table. Growth is relative to the smallest vocabulary. A ratio is PyTorch's time divided by ours."""
    header = ["case", "vocabulary", *(f"{name}{what}" for name in sides for what in ("", " growth"))]
    header += [f"{PEER} ÷ {OURS}"] if PEER in sides else []
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for case in dict.fromkeys(key[:3] for key in times):
        for vocab in vocabs:
            cells = [label(*case), f"{vocab:,}"]
            here, smallest = times[*case, vocab], times[*case, min(vocabs)]
            for name in sides:
                cells += [number(here[name]), f"{here[name] / smallest[name]:.2f}"] if name in here else ["none", ""]
            if PEER in sides:
                cells.append(f"{here[PEER] / here[OURS]:.1f}" if PEER in here else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabs", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="rows of the table")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table [64]")
    parser.add_argument("--ids", type=int, default=4096, help="ids per rank and lookup [4096]")
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs of each side [3]")
    parser.add_argument("--torch-python", default=os.environ.get("TORCH_PYTHON", sys.executable), help="a Python with torch")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write no file of benchmarks/results")
    args = parser.parse_args()
    sizes = [args.dim, *args.vocabs]
    if min(args.repeats, args.ids, *sizes) < 1 or any(size % 2 for size in sizes):
        parser.error("give at least 1 for each number, and even ones, for 2 ranks, for --dim and each of --vocabs")
    sides = {OURS: [build("bench-embedding"), "--json", "-"]}
    if has(args.torch_python, "import torch.distributed._shard.sharded_tensor"):
        sides[PEER] = [args.torch_python, PEERS / "sharded_embedding.py"]
    else:
        say(f"PyTorch is left out: {args.torch_python} has no torch.distributed._shard.")
    times, notes = measure(sides, args)
    date = datetime.date.today().isoformat()
    size = f"dim {args.dim}, {args.ids:,} ids on each of 2 ranks"
    intro = f"{date}, {size}, medians over {args.repeats} alternating repeats, milliseconds:"
    text = "\n\n".join([intro, table(times, args.vocabs, sides), *notes])
    print(text)
    if not args.dry_run:
        rewrite("embedding", text)


if __name__ == "__main__":
    main()
