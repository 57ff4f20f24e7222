#!/usr/bin/env python3
"""Measures training steps of SmolLM2-135M beside PEFT and PyTorch: of an adapter, and of all weights, alternately.

Usage: python3 benchmarks/adapter_step.py MODEL.gguf --torch-python PYTHON [--lm PROGRAM] [--rounds 3] [--only SUBSTRING] [--dry-run]
(MODEL.gguf: what scripts/smollm2.sh prints; PYTHON has torch, transformers 5, gguf and PEFT 0.21)

An adapter has rank 16 and changes all linear layers of the decoder layers. Here its base is the GGUF file, whose weights stay in blocks of
4 bits, or the same weights as f32, which PEFT has in any case. All else is f32. A step has 2 sequences of 128 tokens: the forward pass, the
backward pass and AdamW, and here also the norms of the gradients and of the update.

A number is the median over the rounds of medians over the steps behind the first one; a ratio is the median over the rounds of our seconds by
PyTorch's. `1 × 2` is one rank of two threads, compared with PyTorch on two threads, as is `2 × 1`, two ranks of one thread (tp 2). Memory is the
peak of the whole process.

Writes benchmarks/results/adapter-step.md and adapter-step.json, unless other work takes part of the machine. With --only, rows whose label has
not this text stay as they were measured before.
"""
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from side_by_side import PEERS, RESULTS, ROOT, build, has, processor, require_quiet, rewrite, say, with_threads, with_torch

LORA = ["--lora", "r=16,alpha=32"]
# Label, what PyTorch measures, our base, our flags.
ROWS = [
    ("adapter, base in blocks of 4 bits", "lora", "blocks", LORA),
    ("adapter, base in f32", "lora", "floats", LORA),
    ("all weights", "full", "floats", []),
]
# Ranks, and threads of each.
OURS = [(1, 1), (1, 2), (2, 1)]
STEPS, WARMUP = 3, 1
RECIPE = ["--batch", 2, "--seq-len", 128, "--lr", "1e-4", "--warmup", 1, "--decay", "none", "--clip-norm", 0, "--dtype", "f32"]


def told(command, threads):
    """Runs a measurement, and returns what it prints and the peak of its memory in MiB."""
    command = list(map(str, command))
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        running = subprocess.Popen(command, env=with_threads(threads), stdout=out, stderr=errors)
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, errors):
            file.seek(0)
        if running.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()}")
        return out.read(), usage.ru_maxrss // 1024


def ours(program, model, text, flags, ranks, threads):
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        command = [program, "train", "--model", model, "--train", text, "--tp", ranks, "--threads", threads, "--steps", WARMUP + STEPS, *RECIPE]
        _, peak = told([*command, "--log", log, *flags], threads)
        steps = [json.loads(line) for line in log.read_text().splitlines()]
    seconds = [step["seconds"] for step in steps]
    return dict(seconds=statistics.median(seconds[WARMUP:]), losses=[step["loss"] for step in steps], peak_mib=peak)


def peer(python, model, text, run, threads):
    command = [python, PEERS / "lora_step.py", model, text, "--run", run, "--threads", threads, "--steps", STEPS, "--warmup", WARMUP]
    said, _ = told(command, threads)
    return json.loads(said)


def measured(args, models, text, rows):
    """The runs of each row by side, `(ranks or "torch", threads)`. PyTorch's run is that of all rows that it is compared with."""
    runs = {label: {} for label, *_ in rows}
    for round in range(args.rounds):
        for threads in (1, 2):
            for run in dict.fromkeys(run for _, run, *_ in rows):
                made = peer(args.torch_python, models["floats"], text, run, threads)
                of_run = [(label, base, flags) for label, other, base, flags in rows if other == run]
                for label, base, flags in of_run:
                    runs[label].setdefault(f"torch {threads}", []).append(made)
                    for ranks, of_rank in OURS:
                        if ranks * of_rank == threads:
                            side = ours(args.lm, models[base], text, flags, ranks, of_rank)
                            runs[label].setdefault(f"{ranks} × {of_rank}", []).append(side)
                            seconds = f"{side['seconds']:.2f} s beside {made['seconds']:.2f} s of torch"
                            say(f"round {round + 1}, {label}, {ranks} × {of_rank}: {seconds}")
    return runs


def line(label, sides):
    def ratios(name, count):
        return [a["seconds"] / b["seconds"] for a, b in zip(sides[name], sides[f"torch {count}"])]

    def median(name, field):
        return statistics.median(run[field] for run in sides[name])

    of = {f"{ranks} × {threads}": ratios(f"{ranks} × {threads}", ranks * threads) for ranks, threads in OURS}
    spread = ", ".join(f"{min(series):.2f} to {max(series):.2f}" for series in of.values())
    ratio = {name: f"{statistics.median(series):.2f}" for name, series in of.items()}
    row = [
        label, f"{median('torch 1', 'seconds'):.2f}", ratio["1 × 1"], f"{median('torch 2', 'seconds'):.2f}", ratio["1 × 2"], ratio["2 × 1"], spread,
        f"{median('torch 2', 'peak_mib'):,.0f}", f"{median('1 × 2', 'peak_mib'):,.0f}",
    ]
    return f"| {' | '.join(row)} |"


def flags_of_output(parser):
    parser.add_argument("model", type=Path)
    parser.add_argument("--lm", help="the program lm [default: it is built]")
    parser.add_argument("--only", default="", help="only rows whose label has this text")
    parser.add_argument("--busy", type=float, default=0.03, help="the part of the machine that other work may take [0.03]")
    parser.add_argument("--dry-run", action="store_true", help="print the table only")


def main():
    args = with_torch(__doc__, rounds=3, add=flags_of_output)
    if not has(args.torch_python, "import torch, transformers, gguf, peft"):
        sys.exit(f"{args.torch_python} has no torch, transformers, gguf and peft: give a Python that has them, --torch-python PYTHON.")
    args.lm = args.lm or build("lm")
    text = ROOT / "ARCHITECTURE.md"
    rows = [row for row in ROWS if args.only in row[0]]
    with tempfile.TemporaryDirectory() as folder:
        models = dict(blocks=args.model, floats=Path(folder) / "floats")
        told([args.torch_python, PEERS / "lora_step.py", args.model, text, "--save", models["floats"]], 2)
        busy = require_quiet(args.dry_run, args.busy)
        runs = measured(args, models, text, rows)
    busy = max(busy, require_quiet(args.dry_run, args.busy))
    path = RESULTS / "adapter-step.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else {}
    day = datetime.date.today().isoformat()
    known.update({label: dict(day=day, rounds=args.rounds, processor=processor(), busy=busy, sides=sides) for label, sides in runs.items()})
    lines = [
        "| what is trained | torch 1, s | 1 × 1 | torch 2, s | 1 × 2 | 2 × 1 | spread of 1 × 1, 1 × 2, 2 × 1 | torch 2, MiB | 1 × 2, MiB |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|",
        *[line(label, known[label]["sides"]) for label, *_ in ROWS if label in known],
    ]
    print("\n".join(lines))
    for label, sides in runs.items():
        print(label, {name: [round(loss, 3) for loss in series[0]["losses"]] for name, series in sides.items()})
    if args.dry_run:
        return
    path.write_text(json.dumps(dict(rows=known)) + "\n")
    days = " and ".join(sorted({known[label]["day"] for label in known}))
    most = max(of["busy"] for of in known.values())
    rewrite("steps beside PEFT", f"{processor()}, {days}, {args.rounds} rounds, beside other work of {most:.0%}:\n\n" + "\n".join(lines))
    say("written")


if __name__ == "__main__":
    main()
