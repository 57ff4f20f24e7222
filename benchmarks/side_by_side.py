"""Shared code of the scripts that compare this project with others."""
import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
RESULTS = ROOT / "benchmarks" / "results"


def say(text):
    print(text, file=sys.stderr, flush=True)


def with_threads(count):
    """Returns an environment in which a process, or each rank, computes with this number of threads."""
    names = ("CANDLE_NUM_THREADS", "RAYON_NUM_THREADS", "OMP_NUM_THREADS")
    return {**os.environ, **{name: str(count) for name in names}}


def output(command, tries=1, threads=1):
    """Returns the JSON object that a measurement prints; see output_text."""
    return json.loads(output_text(command, tries, threads))


def output_lines(command, tries=1, threads=1):
    """Returns the JSON objects that a measurement prints, one in each line; see output_text."""
    return [json.loads(line) for line in output_text(command, tries, threads).splitlines()]


def output_text(command, tries, threads):
    """Returns what a measurement prints.

    Ranks compute with one thread, so that only ranks compete for cores. Retries, because a peer may abort occasionally.
    """
    for _ in range(tries):
        run = subprocess.run(command, env=with_threads(threads), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if run.returncode == 0:
            return run.stdout
        say(f"{' '.join(map(str, command))} failed:\n{run.stderr}")
    sys.exit(1)


def build(binary, *features, kind="bin"):
    """Builds a program of this project, or with kind="example" an example, and returns its path."""
    say(f"building {binary}")
    flags = ["--features", ",".join(features)] if features else []
    subprocess.run(["cargo", "build", "--release", "--quiet", "--workspace", f"--{kind}", binary, *flags], cwd=ROOT, check=True)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    return (folder / "examples" if kind == "example" else folder) / binary


def with_torch(doc, rounds=7, add=lambda parser: None):
    """Returns the arguments of a script that compares a program with PyTorch; its docstring is the help, and `add` adds flags."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"alternating runs of each side [{rounds}]")
    parser.add_argument("--torch-python", default=os.environ.get("TORCH_PYTHON", sys.executable), help="a Python with torch")
    add(parser)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("give at least 1 for --rounds")
    return args


def busy(seconds=3):
    """Returns the part of this machine's cores that other work, or other guests, take."""
    def ticks():
        return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]

    before = ticks()
    time.sleep(seconds)
    spent = [b - a for a, b in zip(before, ticks())]
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent))


def require_quiet(dry_run, most=0.03):
    """Ends the script if other work would change what it writes; returns the part of the machine that it takes."""
    part = busy()
    if part > most and not dry_run:
        sys.exit(f"Other work takes {part:.0%} of this machine: stop it, or print the numbers alone with --dry-run.")
    return part


def processor():
    """Returns the name of the processor, and its widest vectors."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = said.get("flags", "").split()
    vectors = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "no AVX2")
    return f"{os.cpu_count()} cores of {said.get('model name', platform.machine())}, family {said.get('cpu family')}, model {said.get('model')} ({vectors})"


def words(flags):
    """Returns a dictionary of flags as the words of a command line."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def has(python, imports):
    """Returns whether this Python can import these modules."""
    return shutil.which(python) and subprocess.run([python, "-c", imports], stderr=subprocess.DEVNULL).returncode == 0


def rewrite(name, text):
    """Writes a text between the markers with this name in a file of benchmarks/results."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    for document in sorted(RESULTS.glob("*.md")):
        old = document.read_text()
        if pattern.search(old):
            document.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", old))
            return
    sys.exit(f"No file of {RESULTS.relative_to(ROOT)} has the markers {begin} and {end}; put them where the table should stand.")


def write(name, file, rounds, lines, **kept):
    """Writes a table between the markers with this name, and the runs into a JSON file of benchmarks/results, if the machine is still quiet."""
    require_quiet(False)
    day = datetime.date.today().isoformat()
    rewrite(name, f"{processor()}, {day}, {rounds} rounds:\n\n" + "\n".join(lines))
    (RESULTS / file).write_text(json.dumps(dict(processor=processor(), day=day, **kept)) + "\n")
    say("written")
