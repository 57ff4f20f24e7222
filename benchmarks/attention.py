#!/usr/bin/env python3
"""Measures causal attention on one rank with one thread, one with two, and two ranks, beside PyTorch with one and two threads, alternately.

Usage: python3 benchmarks/attention.py --torch-python PYTHON [--rounds 5] [--only SUBSTRING] [--dry-run]

Writes the table into benchmarks/results/attention.md and the runs into attention.json beside it, unless other work takes part of the machine.
A number is the median over the rounds of medians over calls; a ratio is the median over the rounds of ours by PyTorch's. `1 × 2` is one rank of
two threads, compared with PyTorch on two threads, as is `2 × 1`, two ranks of one thread (ring attention).
"""
import statistics
import sys

from side_by_side import PEERS, build, has, output, require_quiet, with_torch, words, write

# Label, then the flags of both programs.
SETTINGS = [
    ("8 × 64, 128", dict(length=128)),
    ("8 × 64, 1,024", dict(length=1024)),
    ("8 × 64, 4,096", dict(length=4096)),
    ("2 × 64, 32,768", {"length": 32768, "heads": 2, "kv-heads": 2}),
    ("9/3 × 64, 2,048", {"length": 2048, "heads": 9, "kv-heads": 3}),
    ("8/2 × 128, 2,048", {"length": 2048, "kv-heads": 2, "dim": 128}),
    ("8 × 80, 2,048", dict(length=2048, dim=80)),
    ("16/4 × 96, 1,024", {"length": 1024, "heads": 16, "kv-heads": 4, "dim": 96}),
    ("4/1 × 256, 2,048", {"length": 2048, "heads": 4, "kv-heads": 1, "dim": 256}),
    ("8 × 64, 4,096, window 512", dict(length=4096, window=512)),
    ("8 × 64, 2,048, bf16", dict(length=2048, dtype="bf16")),
    ("8/2 × 128, 2,048, bf16", {"length": 2048, "kv-heads": 2, "dim": 128, "dtype": "bf16"}),
    ("8 × 64, 1,024, f16", dict(length=1024, dtype="f16")),
]
# Ranks, and threads of each.
OURS = [(1, 1), (1, 2), (2, 1)]


def calls(flags):
    """How many calls of a program make a median: fewer of long ones."""
    # PyTorch's backward pass of f16 is slow.
    work = flags["length"] ** 2 * flags.get("heads", 8) * flags.get("dim", 64) * (10 if flags.get("dtype") == "f16" else 1)
    return max(1, min(30, int(2e11 / work)))


def by_phase(report):
    return {row["phase"]: row["ms"] for row in report["rows"]}


def measured(program, python, flags, rounds):
    """The milliseconds of each run of each side: `{(ranks or "torch", threads): [{phase: ms}]}`."""
    count = dict(rounds=calls(flags))
    told = {}
    for _ in range(rounds):
        for threads in (1, 2):
            peer = [python, PEERS / "attention.py", *words({**flags, **count, "threads": threads})]
            told.setdefault(("torch", threads), []).append(by_phase(output(peer, tries=3, threads=threads)))
            for ranks, of_rank in OURS:
                if ranks * of_rank == threads:
                    ours = [program, *words({**flags, **count, "ranks": ranks, "threads": of_rank}), "--json", "-"]
                    told.setdefault((ranks, of_rank), []).append(by_phase(output(ours, threads=of_rank)))
    return told


def flags_of_output(parser):
    parser.add_argument("--only", default="", help="only settings whose label has this text; implies --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="print the table only")


def main():
    args = with_torch(__doc__, rounds=5, add=flags_of_output)
    dry_run = args.dry_run or args.only != ""
    if not has(args.torch_python, "import torch"):
        sys.exit(f"{args.torch_python} has no torch: give a Python that has it, --torch-python PYTHON.")
    program = build("bench-attention")
    require_quiet(dry_run)
    lines = [
        "| heads × width, tokens | phase | torch 1, ms | 1 × 1 | torch 2, ms | 1 × 2 | 2 × 1 | second thread | spread of 1 × 1, 1 × 2 |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    print("\n".join(lines))
    runs = []
    for label, flags in SETTINGS:
        if args.only not in label:
            continue
        told = measured(program, args.torch_python, flags, args.rounds)
        runs.append(dict(label=label, runs=[dict(side=str(side), threads=threads, ms=series) for (side, threads), series in told.items()]))
        for phase in ("forward", "backward"):
            ms = {side: [run[phase] for run in series] for side, series in told.items()}

            def ratios(side):
                return [a / b for a, b in zip(ms[side], ms["torch", side[0] * side[1]])]

            one, threads, ranks = map(ratios, OURS)
            gain = statistics.median(a / b for a, b in zip(ms[1, 1], ms[1, 2]))
            of_torch = [f"{statistics.median(ms['torch', count]):.4g}" for count in (1, 2)]
            of_ours = [f"{statistics.median(series):.2f}" for series in (one, threads, ranks)]
            spread = ", ".join(f"{min(series):.2f} to {max(series):.2f}" for series in (one, threads))
            row = [label, phase, of_torch[0], of_ours[0], of_torch[1], of_ours[1], of_ours[2], f"{gain:.2f}", spread]
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)
    if not dry_run:
        write("attention beside PyTorch", "attention.json", args.rounds, lines, settings=runs)


if __name__ == "__main__":
    main()
