#!/usr/bin/env python3
"""Compares replicas that train apart (`lm train --local-steps`) with replicas that take each step together, after the same tokens.

Usage: python3 benchmarks/local_sgd.py --lm PROGRAM [--steps N] [--run "FLAGS" ..]

A random model learns the documents of this repository on 4 ranks that are threads: that of `lm train`, with the width and the layers that
`--hidden` and `--layers` say. A tenth of the text, in pieces from all over it, is left out; its loss at the end is compared. A row has the
loss, its ratio to that of the first run, in which replicas take all steps together, the bytes that a rank gives to communication in a step,
the ratio of the bytes, and the seconds of a step. `--run` replaces the other runs. One that begins with `after N:` goes on from step N of the
first run; N is a multiple of a tenth of the steps.
"""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

RUNS = [
    "after 300: --local-steps 20 --fragments 4",
    "after 300: --local-steps 10 --outer-lr 1 --outer-momentum 0.5",
    "after 100: --local-steps 10",
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
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--run", action="append", help="flags of a run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        print(f"{write_texts(folder):,} characters of text; {args.steps} steps of {args.batch} x {args.seq_len} tokens, lr {args.lr}")
        base = ["--train", folder / "train", "--valid", folder / "valid", "--valid-every", args.steps, "--dp", 4, "--tp", 1]
        recipe = ["--batch", args.batch, "--seq-len", args.seq_len, "--lr", args.lr, "--warmup", 50]

        def run(flags):
            command = [args.lm, "train", *base, *flags, "--json", "-"]
            done = subprocess.run([str(part) for part in command], check=True, capture_output=True)
            told = json.loads(done.stdout)
            steps = len(told["losses"])
            seconds = told["tokens"] / told["tokens_per_second"] / steps
            return told["valid_losses"][-1][1], told["sent_bytes"][0] / steps, seconds

        run(["--steps", 1, "--save", folder / "random"])
        model, config = folder / "model", folder / "random" / "step-00000001" / "config.json"
        model.mkdir()
        fields = json.loads(config.read_text())
        fields.update(hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4, num_hidden_layers=args.layers)
        fields.update(num_attention_heads=4, num_key_value_heads=2)
        (model / "config.json").write_text(json.dumps(fields))
        (model / "tokenizer.json").write_text((config.parent / "tokenizer.json").read_text())
        recipe += ["--model", model, "--fresh"]
        print("| run | loss | of together | MB per step | of together | s per step |\n|---|---|---|---|---|---|")
        first = None
        for name in ["together", *(args.run or RUNS)]:
            begin, _, flags = name.rpartition(":")
            if first is None:
                flags = [*recipe, "--save", folder / "saved", "--save-every", args.steps // 10]
            elif begin:
                flags = ["--resume", folder / "saved" / f"step-{int(begin.split()[1]):08}", *flags.split()]
            else:
                flags = [*recipe, *flags.split()]
            loss, sent, seconds = run(["--steps", args.steps, *flags])
            first = first or (loss, sent)
            ratios = loss / first[0], sent / first[1]
            print(f"| {name} | {loss:.4f} | {ratios[0]:.4f} | {sent / 1e6:.3f} | {ratios[1]:.4f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
