#!/usr/bin/env bash
# Counts the types of the library crates that share their name with another one, and those that are named by a participle or a question
# word. Usage: scripts/names.sh
#
# A type is a struct, enum, trait, union or type alias at column 0 of a crate's `src`, outside of unit tests. Deprecated aliases do not
# count. Fails if more than 10 % of the types share a name, if one is named by a participle or a question word, or if a word of
# docs/glossary.md is no part of any name in the code.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 - <<'PY'
import collections, pathlib, re, sys

CRATES = ["candle-dist-base", "candle-dist", "candle-dist-kernels", "candle-shard", "candle-pipe", "candle-lm", "candle-prove"]
MOST = 0.10

# Names that several types may have, and why.
SHARED = {
    "Error": "each crate has one",
    "Result": "each crate has one",
    "Options": "of the module that it is in",
    "AdamW": "candle-dist-kernels has the step of one device, candle-shard the optimizer over shards",
    "Dropout": "candle-shard's takes a DTensor, candle-pipe's a Tensor",
    "Linear": "candle-shard's takes a DTensor, candle-pipe's a Tensor",
    "Sequential": "candle-shard's takes a DTensor, candle-pipe's a Tensor",
    "SecretFile": "one of the two is compiled, by platform",
}

# What the last word of a name must not be. Other words in -ed and -ing must not be either, unless they are nouns.
NOT_NOUNS = set("""
    What How Which Who Whose Why When Where
    Beaten Begun Born Bought Broken Brought Built Came Chosen Dealt Done Drawn Driven Fallen Fed Felt Forgotten Found Frozen Given
    Gone Grown Heard Held Hidden Kept Known Laid Led Left Lent Lost Made Meant Met Paid Proven Said Seen Sent Shaken Shown Sold Spent
    Spoken Stolen Stood Stuck Sunk Swept Taken Taught Thought Told Torn Understood Unknown Unmade Unwritten Won Worn Woven Written
    """.split())
NOUNS = set("""
    Bed Embed Feed Need Seed Shed Speed Thread
    Binding Casing Ceiling Embedding Encoding Ending Grouping King Listing Lowering Mapping Meeting Padding Ping Placing Pooling Ring Rounding
    Sampling Scaling Setting Sharing Sibling Spring String Thing Timing Tracing Tying Wing
    """.split())
# Words of the field that are no nouns.
FIELD = {"Pending": "a started call, as in docs/glossary.md"}

DECLARED = re.compile(r"^(?:pub(?:\([^)]*\))?\s+)?(?:unsafe\s+)?(?:struct|enum|trait|union|type)\s+([A-Za-z_]\w*)")
TESTS = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\n]*\]\s*(?://[^\n]*\s*)?)*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+);")


def sources(crate):
    """The files of a crate without its unit tests."""
    files = sorted(pathlib.Path(crate, "src").rglob("*.rs"))
    tests = set()
    for file in files:
        folder = file.parent if file.stem in ("mod", "lib", "main") else file.with_suffix("")
        tests.update(folder / name for name in TESTS.findall(file.read_text()))
    for file in files:
        module = file.parent if file.stem == "mod" else file.with_suffix("")
        if not tests.intersection([module, *module.parents]):
            yield file


def words(name):
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", name)


types = collections.defaultdict(list)
code = set()  # every name in the code, as its words
for crate in CRATES:
    for file in sources(crate):
        lines = file.read_text().split("\n")
        for number, line in enumerate(lines, 1):
            text = re.sub(r'//.*|"(?:[^"\\]|\\.)*"', "", line)
            code.update(re.findall(r"[A-Za-z_]\w*", text))
            found = DECLARED.match(line)
            if found and not any("#[deprecated" in above for above in lines[max(0, number - 3):number - 1]):
                types[found[1]].append(f"{file}:{number}")
code = {" " + " ".join(words(name)).lower() + " " for name in code}

count = sum(map(len, types.values()))
shared = {name: places for name, places in types.items() if len(places) > 1 and name not in SHARED}
allowed = sum(len(types[name]) for name in SHARED if len(types[name]) > 1)
sharing = sum(map(len, shared.values()))
for name, places in sorted(shared.items(), key=lambda item: (-len(item[1]), item[0])):
    print(f"{name}: {' '.join(places)}")


def is_noun(name):
    last = words(name)[-1]
    if name in FIELD or last in NOUNS:
        return True
    return last not in NOT_NOUNS and not re.fullmatch(r"[A-Z][a-z]+(ed|ing)", last)


no_nouns = {name: places for name, places in types.items() if not is_noun(name)}
for name, places in sorted(no_nouns.items()):
    print(f"{name} is no noun: {' '.join(places)}")

unused = []
for line in pathlib.Path("docs/glossary.md").read_text().split("\n"):
    if line.startswith("| **"):
        for term in re.findall(r"\*\*([^*]+)\*\*", line.split("|")[1]):
            plain = term.lower().replace("-", " ")
            stems = [plain, plain.rstrip("s"), plain + "s", plain + "es", re.sub(r"e?d$", "", plain), plain + "d"]
            if not any(f" {stem} " in name for stem in stems for name in code):
                unused.append(term)
if unused:
    print("words of the glossary that no name has:", ", ".join(unused))

print(f"types {count}, sharing a name {sharing} ({sharing / count:.1%}) and {allowed} that may, no nouns {len(no_nouns)}, "
      f"unused words of the glossary {len(unused)}")
sys.exit(sharing > MOST * count or bool(no_nouns))
PY
