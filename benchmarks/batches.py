#!/usr/bin/env python3
"""Measures how many tokens a second lm writes for several prompts at once, alternately for each number of slots.

Usage: python3 benchmarks/batches.py [--model FILE] [--batches 1 2 4 8 16] [--tp 1 2] [--rounds 3] [--max-tokens 64]

Without --model, it takes the SmolLM2-135M-Instruct of scripts/smollm2.sh. A rank has one thread.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile

from side_by_side import ROOT, build, output_lines

# Short prompts, so that most of the time goes to single tokens.
TOPICS = ("river", "mountain", "city", "library", "machine", "garden", "winter", "letter")
PROMPTS = [f"{start} the {topic}" for start in ("A story of", "The history of", "How to draw", "My memory of") for topic in TOPICS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a GGUF file or a name on the Hub")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="texts that are written at once")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="ranks")
    parser.add_argument("--rounds", type=int, default=3, help="alternating runs of each row [3]")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a text [64]")
    args = parser.parse_args()
    if args.rounds < 1 or min(args.batches + args.tp) < 1:
        parser.error("give at least 1 for --rounds, --batches and --tp")
    model = args.model or subprocess.check_output([ROOT / "scripts" / "smollm2.sh"], text=True).strip()
    if not model:
        sys.exit("scripts/smollm2.sh found no model; give one with --model.")
    program = build("lm")
    speeds = {(tp, batch): [] for tp in args.tp for batch in args.batches}
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
        # As many texts as slots need to be full twice.
        texts = [PROMPTS[i % len(PROMPTS)] for i in range(2 * max(args.batches))]
        prompts.write("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        prompts.flush()
        task = ["--model", model, "--prompts", prompts.name, "--max-tokens", str(args.max_tokens), "--temperature", "0"]
        for _ in range(args.rounds):
            for (tp, batch), made in speeds.items():
                command = [program, "generate", *task, "--tp", str(tp), "--batch", str(batch), "--json", "-"]
                made.append(output_lines(command)[-1]["tokens_per_s"])
    print("| texts at once | " + " | ".join(f"{tp} rank{'s' if tp > 1 else ''}, tokens/s | of {args.batches[0]} at once" for tp in args.tp) + " |")
    print("|---|" + "---|---|" * len(args.tp))
    for batch in args.batches:
        cells = []
        for tp in args.tp:
            speed, alone = (statistics.median(speeds[tp, slots]) for slots in (batch, args.batches[0]))
            cells.append(f"{speed:.0f} | {speed / alone:.2f}")
        print(f"| {batch} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
