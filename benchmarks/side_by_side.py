"""Shared code of the scripts that compare this project with others."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
DOCUMENT = ROOT / "BENCHMARKS.md"


def say(text):
    print(text, file=sys.stderr, flush=True)


def one_thread():
    """Returns an environment in which a rank computes with one thread, so that only ranks compete for cores."""
    return {**os.environ, **{name: "1" for name in ("CANDLE_NUM_THREADS", "RAYON_NUM_THREADS", "OMP_NUM_THREADS")}}


def output(command, tries=1):
    """Returns the JSON object that a measurement prints. Retries, because a peer may abort occasionally."""
    for _ in range(tries):
        run = subprocess.run(command, env=one_thread(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if run.returncode == 0:
            return json.loads(run.stdout)
        say(f"{' '.join(map(str, command))} failed:\n{run.stderr}")
    sys.exit(1)


def build(binary, *features):
    """Builds a program of this project and returns its path."""
    say(f"building {binary}")
    flags = ["--features", ",".join(features)] if features else []
    subprocess.run(["cargo", "build", "--release", "--quiet", "--workspace", "--bin", binary, *flags], cwd=ROOT, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / binary


def has(python, imports):
    """Returns whether this Python can import these modules."""
    return shutil.which(python) and subprocess.run([python, "-c", imports], stderr=subprocess.DEVNULL).returncode == 0


def rewrite(name, text):
    """Writes a text between the markers with this name in BENCHMARKS.md."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    document = DOCUMENT.read_text()
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(document):
        sys.exit(f"{DOCUMENT.name} does not have the markers {begin} and {end}; put them where the table should stand.")
    DOCUMENT.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document))
