#!/usr/bin/env python3
"""Measures one layer of each kind of newer models beside the same layer in transformers, with one thread and with two, alternately.

Usage: python3 benchmarks/layers.py --torch-python PYTHON [--rounds 3] [--only SUBSTRING] [--dry-run]

PYTHON has torch and transformers 5, which writes the models: one layer of random weights, and small tables. A prompt has 512 or 2,048 tokens;
a token of 1 or 8 texts follows 512 tokens of each. Writes the table into benchmarks/results/layers.md and the runs into layers.json beside it,
unless other work takes part of the machine. A number is the median over the rounds of medians over calls; a ratio is the median over the rounds
of ours by that of transformers. Ours is the whole pass, from tokens to logits; theirs the layer alone, and the whole pass in brackets. Ends with an
error if the logits of the two differ.
"""
import statistics
import sys
import tempfile

from side_by_side import PEERS, build, has, output, require_quiet, say, with_torch, write

PARTS = [
    "gated delta net",
    "latent attention",
    "Mamba 2",
    "attention with sinks",
    "clamped experts, windows with sinks",
    "routed experts",
    "routed experts with a shared one",
    "short convolution",
    "windows and embeddings of layers",
]
THREADS = (1, 2)
# The largest difference of logits, as a part of the largest logit.
NEAR = 1e-4


def difference(ours, theirs):
    """Returns the largest difference of logits, as a part of the largest one."""
    pairs = [(a, b) for row, other in zip(ours, theirs, strict=True) for a, b in zip(row, other, strict=True)]
    return max(abs(a - b) for a, b in pairs) / max(1.0, max(abs(b) for _, b in pairs))


def measured(program, python, folder, rounds):
    """The phases of each round and number of threads: `{(threads, phase): [{ours, layer, whole, difference}]}`."""
    told = {}
    for _ in range(rounds):
        for threads in THREADS:
            theirs = output([python, PEERS / "layers.py", "measure", folder, "--threads", str(threads)], tries=3, threads=threads)
            ours = output([program, "--model", folder, "--threads", str(threads)], threads=threads)
            for mine, other in zip(ours, theirs["rows"], strict=True):
                assert mine["phase"] == other["phase"]
                row = dict(ours=mine["ms"], layer=other["ms"], whole=other["whole"])
                row["difference"] = difference(mine["logits"], other["logits"])
                told.setdefault((threads, mine["phase"]), []).append(row)
    return told


def cells(runs):
    """The columns of a number of threads: theirs, the ratio, and its spread."""
    theirs = [statistics.median(run[name] for run in runs) for name in ("layer", "whole")]
    ratios = [run["ours"] / run["layer"] for run in runs]
    of_pass = statistics.median(run["ours"] / run["whole"] for run in runs)
    return [
        f"{theirs[0]:.4g} ({theirs[1]:.4g})", f"{statistics.median(ratios):.2f} ({of_pass:.2f})", f"{min(ratios):.2f} to {max(ratios):.2f}",
    ]


def flags_of_output(parser):
    parser.add_argument("--only", default="", help="only parts whose name has this text; implies --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="print the table only")


def main():
    args = with_torch(__doc__, rounds=3, add=flags_of_output)
    dry_run = args.dry_run or args.only != ""
    if not has(args.torch_python, "import torch, transformers"):
        sys.exit(f"{args.torch_python} has no torch and transformers: give a Python that has them, --torch-python PYTHON.")
    program = build("bench-layers", kind="example")
    require_quiet(dry_run)
    lines = [
        "| layer | phase | transformers, 1 thread, ms | ours by it | spread | transformers, 2 threads, ms | ours by it | spread |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    print("\n".join(lines))
    kept, apart = [], []
    for part in PARTS:
        if args.only not in part:
            continue
        with tempfile.TemporaryDirectory() as folder:
            parameters = output([args.torch_python, PEERS / "layers.py", "write", folder, part])["parameters"]
            told = measured(program, args.torch_python, folder, args.rounds)
        kept.append(dict(part=part, parameters=parameters, runs=[dict(threads=key[0], phase=key[1], runs=runs) for key, runs in told.items()]))
        for phase in dict.fromkeys(phase for _, phase in told):
            row = [part, phase, *(cell for threads in THREADS for cell in cells(told[threads, phase]))]
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
        worst = max(run["difference"] for runs in told.values() for run in runs)
        say(f"{part}: {parameters:,} parameters; the largest difference of logits is {worst:.1e}")
        if worst > NEAR:
            apart.append(part)
    if apart:
        sys.exit(f"The logits of these differ by more than {NEAR} of the largest: {', '.join(apart)}.")
    if not dry_run:
        write("layers beside transformers", "layers.json", args.rounds, lines, parts=kept)


if __name__ == "__main__":
    main()
