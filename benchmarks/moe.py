#!/usr/bin/env python3
"""Measures a mixture of experts on one and two ranks here, and loops over experts in PyTorch, alternately on two cores.

Usage: python3 benchmarks/moe.py [--rounds 7] [--torch-python PYTHON]

Without a Python that has torch (--torch-python, or TORCH_PYTHON in the environment), measures only ours. Two ranks have one
thread each; PyTorch has two threads.
"""
import statistics

from side_by_side import PEERS, build, has, output, say, with_torch, words

SETTINGS = {
    "16 experts, top 2": {"tokens": 2048, "width": 256, "hidden": 512, "experts": 16, "top-k": 2},
    "64 experts, top 6": {"tokens": 2048, "width": 256, "hidden": 128, "experts": 64, "top-k": 6},
}


def main():
    args = with_torch(__doc__)
    program = build("bench-moe")
    peer = has(args.torch_python, "import torch")
    if not peer:
        say(f"PyTorch is left out: {args.torch_python} has no torch.")
    print("| setting | routing | run | ms | of two ranks | spread of the ratio |")
    print("|---|---|---|---|---|---|")
    for label, size in SETTINGS.items():
        flags = words(size)
        times = {}
        for _ in range(args.rounds):
            for ranks in (2, 1):
                for row in output([program, *flags, "--ranks", str(ranks), "--json", "-"])["rows"]:
                    name = "two ranks" if ranks == 2 else "one rank"
                    times.setdefault((row["routing"], name), []).append(row["ms"])
            if peer:
                for row in output([args.torch_python, PEERS / "moe.py", *flags, "--threads", "2"])["rows"]:
                    times.setdefault((row["routing"], f"PyTorch, {row['loop']}"), []).append(row["ms"])
        for (routing, name), series in times.items():
            ratios = [a / b for a, b in zip(series, times[routing, "two ranks"])]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            ms, ratio = statistics.median(series), statistics.median(ratios)
            print(f"| {label} | {routing} | {name} | {ms:.2f} | {ratio:.2f} | {spread} |")


if __name__ == "__main__":
    main()
