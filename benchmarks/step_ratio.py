#!/usr/bin/env python3
"""Step times of the toy Transformer, tensor-parallel against one device, in one alternating run.

Usage: benchmarks/step_ratio.py [ROUNDS]      (after cargo build --release)
"""
import json
import os
import statistics
import subprocess
import sys

SETTINGS = {
    "small: dim 64, sequence 32, batch 4": "--dim 64 --seq 32 --batch 4 --steps 40",
    "large: dim 256, sequence 128, batch 8": "--dim 256 --seq 128 --batch 8 --steps 6",
}
BINARY = os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release", "toy-transformer")


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print("| setting | run | ms/step | of one device | spread of the ratio |")
    print("|---|---|---|---|---|")
    for label, flags in SETTINGS.items():
        runs = ",".join(["single,tp,tp_sp"] * rounds)
        command = [BINARY, *flags.split(), "--heads", "8", "--layers", "2", "--dropout", "0", "--runs", runs, "--json", "-"]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)
        times = {name: [r["ms_per_step"] for r in report["runs"] if r["name"] == name] for name in ("single", "tp", "tp_sp")}
        for name, series in times.items():
            ratios = [a / b for a, b in zip(series, times["single"])]
            print(f"| {label} | {name} | {statistics.median(series):.2f} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |")


if __name__ == "__main__":
    main()
