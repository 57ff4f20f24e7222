#!/usr/bin/env python3
"""Measures step times of the toy Transformer on one device and tensor-parallel, here and in PyTorch, alternately.

Usage: python3 benchmarks/step_ratio.py [--rounds 7] [--torch-python PYTHON]

single_threads is one device with two threads; elsewhere each rank has one.

Without a Python that has torch and expecttest (--torch-python, or TORCH_PYTHON in the environment), measures only ours.
"""
import statistics

from side_by_side import PEERS, build, has, output, say, with_torch, words

SETTINGS = {
    "small: dim 64, sequence 32, batch 4": ({"dim": 64, "seq": 32, "batch": 4}, 40),
    "large: dim 256, sequence 128, batch 8": ({"dim": 256, "seq": 128, "batch": 8}, 16),
    "wide: dim 1,024, sequence 256, batch 4": ({"dim": 1024, "seq": 256, "batch": 4}, 4),
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
    print("| setting | run | ms/step | of one device | spread of the ratio | of PyTorch's | spread |")
    print("|---|---|---|---|---|---|---|")
    for label, (size, steps) in SETTINGS.items():
        times = {}
        for _ in range(args.rounds):
            ours = [program, *flags(size, steps), "--heads", "8", "--layers", "2", "--dropout", "0"]
            for run in output([*ours, "--runs", ",".join(RUNS), "--json", "-"])["runs"]:
                times.setdefault(run["name"], []).append(run["ms_per_step"])
            threads = output([*ours, "--runs", "single", "--json", "-"], threads=2)["runs"]
            times.setdefault("single_threads", []).append(threads[0]["ms_per_step"])
            if peer:
                runs = output([args.torch_python, PEERS / "toy_transformer.py", *flags(size, steps)], tries=3)["runs"]
                for name, ms in runs.items():
                    times.setdefault(f"PyTorch {name}", []).append(ms)
        for name, series in times.items():
            ratios = [a / b for a, b in zip(series, times["single"])]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            of_peer = [a / b for a, b in zip(series, times.get(f"PyTorch {name}", []))]
            told = f"{statistics.median(of_peer):.2f} | {min(of_peer):.2f} to {max(of_peer):.2f}" if of_peer else "– | –"
            print(f"| {label} | {name} | {statistics.median(series):.2f} | {statistics.median(ratios):.2f} | {spread} | {told} |", flush=True)


if __name__ == "__main__":
    main()
