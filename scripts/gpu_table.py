#!/usr/bin/env python3
"""Writes the table of GPU.md from the log of gpu-device.sh.

usage: gpu_table.py LOG [--date YYYY-MM-DD] [--print]

The table has a line for each step, and one for each number, beside PyTorch's where the log has it. Without a line "--- N s" the log is not whole,
which the table says. --print writes to the standard output only.
"""
import argparse
import datetime
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- card: begin -->", "<!-- card: end -->"


def numbers(log):
    """The numbers by step: `{(step, name): (value, unit)}`; the last one of a name counts."""
    told, step = {}, ""
    for line in log.splitlines():
        step = line[4:] if line.startswith("=== ") else step
        if match := re.match(r"(?:rank \d+: )?NUMBER (.*): ([\d.]+) ?(.*)$", line):
            told[step, match[1]] = (float(match[2]), match[3])
    return told


def table(log, date):
    card = re.search(r"^GPU 0: (.*?) \(UUID", log, re.M)
    whole = re.search(r"^--- (\d+) s$", log, re.M)
    lines = [f"{card[1] if card else 'no card'}, {date}, " + (f"{whole[1]} s in all:" if whole else "**not run to its end**:"), ""]
    steps = re.findall(r"^(PASSED|FAILED|SKIPPED) +([a-z][a-z0-9-]*) +(\d+) s *(.*)$", log[whole.start():] if whole else "", re.M)
    lines += ["| step | result | seconds | |", "|---|---|---:|---|"] + [f"| {name} | {what} | {s} | {why} |" for what, name, s, why in steps]
    told = numbers(log)
    peers = {name.removeprefix("peer's "): value for (_, name), (value, _) in told.items() if name.startswith("peer's ")}
    ours = [(step, name, value, unit) for (step, name), (value, unit) in told.items() if not name.startswith("peer's ")]
    if ours:
        lines += ["", "| step | number | here | PyTorch | ratio |", "|---|---|---:|---:|---:|"]
    for step, name, value, unit in ours:
        peer = peers.get(name)
        more = f"{peer:,.2f} | {value / peer:.2f}" if peer else " | "
        lines.append(f"| {step} | {name} | {value:,.2f} {unit}".rstrip() + f" | {more} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=pathlib.Path)
    parser.add_argument("--date", default=str(datetime.date.today()))
    parser.add_argument("--print", action="store_true")
    args = parser.parse_args()
    made = table(args.log.read_text(errors="replace"), args.date)
    print(made)
    if args.print:
        return
    page = ROOT / "GPU.md"
    text = page.read_text()
    if BEGIN not in text or END not in text:
        sys.exit(f"{page} has no lines {BEGIN} and {END}")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}\n{made}\n{after}")


if __name__ == "__main__":
    main()
