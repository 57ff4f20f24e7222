#!/usr/bin/env python3
"""Compares this project's collectives with those of Gloo and Open MPI, and writes the table into benchmarks/results.

Usage: python3 benchmarks/collectives.py [--backend mpi] [--worlds 2 4] [--repeats 3] [--torch-python PYTHON] [--dry-run]
       python3 benchmarks/collectives.py --backend mpi --worlds 2 4 8 --json -

It builds bench-collectives and then runs the three alternately. Each number is the median of its runs. With
--backend mpi, our ranks are processes over Open MPI's messages, and Open MPI is the only peer. A peer that is not
installed is left out, with a note on how to install it:

  Gloo      python3 -m venv ~/torch-venv && ~/torch-venv/bin/pip install torch numpy
            and --torch-python ~/torch-venv/bin/python, or TORCH_PYTHON in the environment
  Open MPI  apt-get install openmpi-bin libopenmpi-dev

Nothing else should run on the machine: the table is written only if the load average of the last minute was at most 0.5
at the start. --dry-run and --json measure on any machine, and report its load.
"""
import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from side_by_side import PEERS, build, has, output, rewrite, say

OURS = "candle-dist"
# The maximum load average of the last minute at which a table is written.
QUIET = 0.5


def mpirun(world):
    """Returns the command that starts this many processes."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", "--oversubscribe", *root, "-n", str(world)]


def build_ours(backend):
    program = build("bench-collectives", *([backend] if backend == "mpi" else []))
    launch = mpirun if backend == "mpi" else lambda world: []
    return lambda world: [*launch(world), program, "--backend", backend, "--world", str(world), "--json", "-"]


def build_gloo(python):
    if not has(python, "import torch.distributed as d; assert d.is_gloo_available()"):
        say(f"Gloo is left out: {python} has no torch with Gloo; see --help for how to install it.")
        return None
    return lambda world: [python, PEERS / "gloo.py", "--world", str(world)]


def build_openmpi(folder):
    if not shutil.which("mpicc") or not shutil.which("mpirun"):
        say("Open MPI is left out: mpicc or mpirun is missing; apt-get install openmpi-bin libopenmpi-dev.")
        return None
    program = Path(folder) / "openmpi"
    subprocess.run(["mpicc", "-O3", "-o", program, PEERS / "openmpi.c"], check=True)
    return lambda world: [*mpirun(world), program]


def measure(sides, worlds, repeats):
    """Returns the median microseconds by world, (op, bytes) and side, and the floors by world and (op, bytes)."""
    runs, floors = {}, {}
    for repeat in range(repeats):
        for world in worlds:
            for name, command in sides.items():
                say(f"repeat {repeat + 1} of {repeats}, world {world}: {name}")
                for row in output(command(world))["rows"]:
                    key = (row["op"], row["bytes"])
                    runs.setdefault(world, {}).setdefault(key, {}).setdefault(name, []).append(row["median_us"])
                    if name == OURS:
                        floors.setdefault(world, {}).setdefault(key, []).append(row["floor_us"])
    medians = lambda series: {key: statistics.median(values) for key, values in series.items()}
    times = {world: {key: medians(by_side) for key, by_side in rows.items()} for world, rows in runs.items()}
    return times, {world: medians(rows) for world, rows in floors.items()}


def number(us):
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def size(count):
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def table(rows, floors, sides):
    """Returns one world's table. A ratio is the peer's time divided by ours."""
    peers = [name for name in sides if name != OURS]
    header = ["op", "input", "floor", *sides, *(f"{peer} ÷ ours" for peer in peers)]
    lines = [f"| {' | '.join(header)} |", "|---|" + "---:|" * (len(header) - 1)]
    for (op, count), times in rows.items():
        ratios = (f"{times[peer] / times[OURS]:.2f}" for peer in peers)
        cells = [op, size(count), number(floors[op, count]), *(number(times[name]) for name in sides), *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(times, floors, sides, repeats):
    date = datetime.date.today().isoformat()
    cores = len(os.sched_getaffinity(0))
    busy = os.getloadavg()[2]
    parts = [f"{date}, {cores} cores, medians over {repeats} alternating repeats, load average of the last 15 minutes {busy:.1f}:"]
    for world, rows in times.items():
        crowded = f", more than the {cores} cores" if world > cores else ""
        parts.append(f"World {world}{crowded}, microseconds:\n\n{table(rows, floors[world], sides)}")
    return "\n\n".join(parts)


def report(times, floors, args, busy):
    """Returns all measurements as one object. A ratio is the peer's time divided by ours."""
    rows = []
    for world, of_world in times.items():
        for (op, count), by_side in of_world.items():
            ratios = {name: round(us / by_side[OURS], 3) for name, us in by_side.items() if name != OURS}
            rows.append({"world": world, "op": op, "bytes": count, "floor_us": floors[world][op, count], "median_us": by_side, "peer_over_ours": ratios})
    return {"backend": args.backend, "repeats": args.repeats, "cores": len(os.sched_getaffinity(0)), "load_before": busy, "rows": rows}


def write_json(target, value):
    text = json.dumps(value, indent=1)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["threads", "mpi"], default="threads", help="the backend of our ranks [threads]")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks [2 4]")
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs of each side [3]")
    parser.add_argument("--torch-python", default=os.environ.get("TORCH_PYTHON", sys.executable), help="a Python with torch")
    parser.add_argument("--dry-run", action="store_true", help="print the tables and write no file of benchmarks/results")
    parser.add_argument("--json", metavar="FILE", help="write the medians as JSON and write no file of benchmarks/results; `-` is stdout, with nothing else on it")
    args = parser.parse_args()
    if args.repeats < 1 or min(args.worlds) < 1:
        parser.error("give at least 1 for --repeats and for each of --worlds")
    busy = os.getloadavg()[0]
    if busy > QUIET and not (args.dry_run or args.json):
        sys.exit(f"The load average of the last minute is {busy:.2f}, which would distort the table: wait until it is "
                 f"at most {QUIET}, or use --dry-run or --json to measure without writing.")
    with tempfile.TemporaryDirectory() as folder:
        built = {OURS: build_ours(args.backend), "Open MPI": build_openmpi(folder)}
        if args.backend == "threads":
            built = {OURS: built[OURS], "Gloo": build_gloo(args.torch_python), **built}
        sides = {name: command for name, command in built.items() if command}
        times, floors = measure(sides, args.worlds, args.repeats)
    if args.json:
        write_json(args.json, report(times, floors, args, busy))
        if args.json == "-":
            return
    text = section(times, floors, sides, args.repeats)
    print(text)
    if not (args.dry_run or args.json):
        rewrite({"threads": "collectives", "mpi": "collectives over MPI"}[args.backend], text)


if __name__ == "__main__":
    main()
