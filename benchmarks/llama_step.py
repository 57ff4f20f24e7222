#!/usr/bin/env python3
"""Measures training steps of a Llama model of real width beside PyTorch, eager and compiled, alternately.

Usage: python3 benchmarks/llama_step.py --torch-python PYTHON [--lm PROGRAM] [--rounds 3] [--widths 1024 2048] [--only SUBSTRING] [--dry-run]
(PYTHON has torch and transformers 5)

The model has 2 layers, heads of 64, a key head for each 4 heads, and 256 tokens. A step has 8 sequences of 256 tokens: the forward pass, the
backward pass and AdamW. In bf16 PyTorch keeps weights and moments in bf16; ours has master weights and moments of 32 bits, as `lm train` does.

A number is the median over the rounds of medians over the steps behind the first one; a ratio is the median over the rounds of ours by
PyTorch's on as many threads. `1 × 2` is one rank of two threads, `2 × 1` two ranks of one (tp 2). Memory is the peak of the process, for
PyTorch less what it has before the model.

Writes the table into benchmarks/results/training-step.md and the runs into llama-step.json beside it, unless other work takes part of the
machine. With --only, rows whose label has not this text stay as they were measured before.
"""
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from side_by_side import PEERS, RESULTS, ROOT, build, has, output, processor, require_quiet, rewrite, say, with_threads, with_torch

# Ranks, and threads of each.
OURS = [(1, 1), (1, 2), (2, 1)]
STEPS, WARMUP = 3, 1


def ours(program, model, dtype, ranks, threads):
    with tempfile.TemporaryDirectory() as folder:
        log, told = Path(folder) / "log.jsonl", Path(folder) / "told.json"
        command = [
            program, "train", "--model", model, "--train", ROOT / "README.md", "--tp", ranks, "--threads", threads, "--dtype", dtype,
            "--batch", 8, "--seq-len", 256, "--steps", WARMUP + STEPS, "--lr", "1e-4", "--warmup", 1, "--log", log, "--json", told,
        ]
        done = subprocess.run(list(map(str, command)), env=with_threads(threads), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}")
        seconds = [json.loads(line)["seconds"] for line in log.read_text().splitlines()]
        # Ranks are threads of one process.
        peak = max(json.loads(told.read_text())["peak_memory"]) / 2**20
    return dict(seconds=statistics.median(seconds[WARMUP:]), peak_mib=peak)


def measured(program, python, model, dtype, rounds):
    """The runs of each side: `{side: [run]}`."""
    told = {}
    for round in range(rounds):
        for threads in (1, 2):
            for name, more in (("eager", []), ("compiled", ["--compile"])):
                peer = [python, PEERS / "llama_step.py", model, "--dtype", dtype, "--threads", str(threads), "--steps", str(STEPS), *more]
                # Compiled code is made in the first step.
                told.setdefault(f"{name} {threads}", []).append(output(peer, tries=2, threads=threads))
            for ranks, of_rank in OURS:
                if ranks * of_rank == threads:
                    told.setdefault(f"{ranks} × {of_rank}", []).append(ours(program, model, dtype, ranks, of_rank))
        say(f"round {round + 1}: " + ", ".join(f"{side} {runs[-1]['seconds']:.2f} s" for side, runs in told.items()))
    return told


def ratio(told, side, peer):
    by_round = [a["seconds"] / b["seconds"] for a, b in zip(told[side], told[peer])]
    return f"{statistics.median(by_round):.2f} ({min(by_round):.2f} to {max(by_round):.2f})"


def lines_of(label, told):
    def median(side, what="seconds"):
        return statistics.median(run[what] for run in told[side])

    for side, threads in (("1 × 1", 1), ("1 × 2", 2), ("2 × 1", 2)):
        eager, compiled = f"eager {threads}", f"compiled {threads}"
        memory = f"{median(side, 'peak_mib'):,.0f}, {median(eager, 'peak_mib'):,.0f}, {median(compiled, 'peak_mib'):,.0f}"
        yield (
            f"| {label} | {side} | {median(side):.2f} | {median(eager):.2f} | {ratio(told, side, eager)} | {median(compiled):.2f} "
            f"| {ratio(told, side, compiled)} | {ratio(told, side, '1 × 1')} | {memory} |"
        )


def flags(parser):
    parser.add_argument("--lm", help="the program, instead of one that is built")
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--only", default="")
    parser.add_argument("--dry-run", action="store_true", help="print the table only")


def main():
    args = with_torch(__doc__, rounds=3, add=flags)
    if not has(args.torch_python, "import torch, transformers"):
        sys.exit(f"{args.torch_python} has no torch and transformers: give a Python that has them, --torch-python PYTHON.")
    program = args.lm or build("lm")
    require_quiet(args.dry_run)
    kept = RESULTS / "llama-step.json"
    runs = json.loads(kept.read_text())["runs"] if kept.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for width in args.widths:
            model = Path(folder) / str(width)
            for dtype in ("f32", "bf16"):
                label = f"width {width:,}, {dtype}"
                if args.only not in label:
                    continue
                if not model.exists():
                    subprocess.run([args.torch_python, PEERS / "llama_step.py", model, "--write", str(width)], check=True, stderr=subprocess.DEVNULL)
                runs[label] = measured(program, args.torch_python, model, dtype, args.rounds)
    header = [
        "| model | ranks × threads | seconds | eager | ratio | compiled | ratio | of 1 × 1 | memory: ours, eager, compiled, MiB |",
        "|---|---|---:|---:|---|---:|---|---|---|",
    ]
    table = "\n".join(header + [line for label, told in sorted(runs.items()) for line in lines_of(label, told)])
    print(table)
    if not args.dry_run:
        about = f"{processor()}, {datetime.date.today()}"
        kept.write_text(json.dumps(dict(about=about, runs=runs), indent=1) + "\n")
        rewrite("llama steps", f"{about}:\n\n{table}")


if __name__ == "__main__":
    main()
