#!/usr/bin/env python3
"""Compares the cost of distributed ops over plain ones with PyTorch's, and writes the table into benchmarks/results.

Usage: python3 benchmarks/dispatch.py [--repeats 3] [--torch-python PYTHON] [--dry-run]

It builds bench-dispatch and then runs the two alternately. Each number is the median of its runs. Without a Python that
has torch (--torch-python, or TORCH_PYTHON in the environment), only ours is measured. Nothing else should run.
"""
import argparse
import datetime
import os
import statistics
import sys

from side_by_side import PEERS, build, has, output, rewrite, say


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs of each side [3]")
    parser.add_argument("--torch-python", default=os.environ.get("TORCH_PYTHON", sys.executable), help="a Python with torch")
    parser.add_argument("--dry-run", action="store_true", help="print the table and write no file of benchmarks/results")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("give at least 1 for --repeats")
    sides = {"ours": [build("bench-dispatch"), "--json", "-"]}
    if has(args.torch_python, "import torch.distributed.tensor"):
        sides["PyTorch"] = [args.torch_python, PEERS / "dtensor_dispatch.py"]
    else:
        say(f"PyTorch is left out: {args.torch_python} has no torch.distributed.tensor.")
    series = {}
    for repeat in range(args.repeats):
        for name, command in sides.items():
            say(f"repeat {repeat + 1} of {args.repeats}: {name}")
            for row in output(command)["rows"]:
                for what in ("plain_ns", "warm_ns", "first_ns"):
                    series.setdefault((row["op"], row["axes"]), {}).setdefault((name, what), []).append(row[what])
    columns = [(name, what) for name in sides for what in ("plain_ns", "warm_ns", "first_ns")]
    header = ["op", "axes", *(f"{name} {what.removesuffix('_ns')}" for name, what in columns)]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for (op, axes), values in series.items():
        # PyTorch's `distribute_tensor` always communicates, so it has no such row.
        numbers = (f"{statistics.median(values[column]):,.0f}" if column in values else "–" for column in columns)
        cells = [op, str(axes), *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    date = datetime.date.today().isoformat()
    text = f"{date}, medians over {args.repeats} alternating repeats, nanoseconds:\n\n" + "\n".join(lines)
    print(text)
    if not args.dry_run:
        rewrite("dispatch", text)


if __name__ == "__main__":
    main()
