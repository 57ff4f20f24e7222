#!/usr/bin/env python3
"""Measures step times of the toy Transformer on one device and tensor-parallel, here and in PyTorch, alternately.

Usage: python3 benchmarks/step_ratio.py [--rounds 7] [--torch-python PYTHON]

Without a Python that has torch and expecttest (--torch-python, or TORCH_PYTHON in the environment), measures only ours.
"""
import statistics

from side_by_side import PEERS, build, has, output, say, with_torch, words

SETTINGS = {
    "small: dim 64, sequence 32, batch 4": ({"dim": 64, "seq": 32, "batch": 4}, 40),
    "large: dim 256, sequence 128, batch 8": ({"dim": 256, "seq": 128, "batch": 8}, 16),
}
RUNS = ("single", "tp", "tp_sp")


def flags(size, steps):
    return words({**size, "steps": steps})


def main():
    args = with_torch(__doc__)
    program = build("toy-transformer")
    peer = has(args.torch_python, "import torch.testing._internal.distributed._tensor.common_dtensor")
    if not peer:
        say(f"PyTorch is left out: {args.torch_python} has no torch with its test models (torch, numpy, expecttest).")
    print("| setting | run | ms/step | of one device | spread of the ratio |")
    print("|---|---|---|---|---|")
    for label, (size, steps) in SETTINGS.items():
        times = {}
        for _ in range(args.rounds):
            ours = [program, *flags(size, steps), "--heads", "8", "--layers", "2", "--dropout", "0"]
            for run in output([*ours, "--runs", ",".join(RUNS), "--json", "-"])["runs"]:
                times.setdefault(run["name"], []).append(run["ms_per_step"])
            if peer:
                runs = output([args.torch_python, PEERS / "toy_transformer.py", *flags(size, steps)], tries=3)["runs"]
                for name, ms in runs.items():
                    times.setdefault(f"PyTorch {name}", []).append(ms)
        for name, series in times.items():
            ratios = [a / b for a, b in zip(series, times["single"])]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"| {label} | {name} | {statistics.median(series):.2f} | {statistics.median(ratios):.2f} | {spread} |")


if __name__ == "__main__":
    main()
