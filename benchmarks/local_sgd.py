#!/usr/bin/env python3
"""Compares replicas that train apart (`lm train --local-steps`) with replicas that take each step together, after the same tokens.

Usage: python3 benchmarks/local_sgd.py --lm PROGRAM [--steps N] [--run "FLAGS" ..]

The small random model of `lm train` learns the documents of this repository on 4 ranks that are threads. A tenth of the text, in pieces from
all over it, is left out; its loss at the end is compared. A row has the loss, its ratio to that of the first run, the bytes that a rank gave
to communication, the ratio of the bytes, and the seconds. `--run` replaces the runs that are compared with the first, and `--pre N` lets
replicas take the first N steps together.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

RUNS = [
    "--local-steps 10",
    "--local-steps 20",
    "--local-steps 50",
    "--local-steps 20 --fragments 4",
]


def write_texts(folder):
    root = Path(__file__).parent.parent
    files = sorted(path for path in root.rglob("*.md") if "target" not in path.parts)
    text = "\n".join(path.read_text() for path in files)
    size = 2048
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    (folder / "valid").write_text("".join(pieces[::10]))
    (folder / "train").write_text("".join(piece for at, piece in enumerate(pieces) if at % 10))
    return len(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm", required=True, help="the program lm")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--pre", type=int, default=0, help="steps that replicas take together before they go apart")
    parser.add_argument("--run", action="append", help="flags of a run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        print(f"{write_texts(folder):,} characters of text; {args.steps} steps of {args.batch} x {args.seq_len} tokens, lr {args.lr}")
        base = ["--train", folder / "train", "--valid", folder / "valid", "--dp", 4, "--tp", 1, "--json", "-"]
        recipe = ["--batch", args.batch, "--seq-len", args.seq_len, "--lr", args.lr, "--warmup", 50]

        def run(flags):
            command = [args.lm, "train", *base, *flags]
            done = subprocess.run([str(part) for part in command], check=True, capture_output=True)
            return json.loads(done.stdout)

        begin, before = recipe, 0
        if args.pre:
            # The rate falls over all steps, so this one stops half-way.
            saved = ["--save", folder / "pre", "--save-every", args.pre]
            run([*recipe, "--steps", args.steps, *saved])
            begin, before = ["--resume", folder / "pre" / f"step-{args.pre:08}"], args.pre
        first = None
        print("| run | loss | of together | MB sent per rank | of together | s |\n|---|---|---|---|---|---|")
        for flags in ["", *(args.run or RUNS)]:
            told = run([*begin, "--steps", args.steps, *flags.split()])
            loss, sent = told["valid_losses"][-1][1], told["sent_bytes"][0]
            first = first or (loss, sent)
            seconds = told["tokens"] / told["tokens_per_second"]
            print(
                f"| {flags or 'together'} | {loss:.4f} | {loss / first[0]:.4f} | {sent / 1e6:.2f} | {sent / first[1]:.4f} | {seconds:.0f} |",
                flush=True,
            )
        if before:
            print(f"All went on from step {before}, which replicas had taken together.")


if __name__ == "__main__":
    main()
