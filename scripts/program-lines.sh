#!/usr/bin/env bash
# Counts the lines of five programs of this repository and of PyTorch's beside them, prints a table, and fails if one is too long.
# Usage: scripts/program-lines.sh
#
# A line counts if it has code: blank lines, comments, docstrings and imports are left out for both. Each program is a whole file. Ours
# start their ranks, and compare the result with one rank, in the lines that count; torchrun starts PyTorch's.
set -euo pipefail
cd "$(dirname "$0")/.."

# Our program, PyTorch's, the most lines of ours, and what it is.
programs=(
  "tensor-parallel tensor_parallel 16 tensor-parallel MLP"
  "phi phi 45 data × tensor parallel Phi"
  "pipeline pipeline 40 pipeline with a checkpoint, resumed on another number of stages"
  "fsdp fully_sharded 24 fully sharded training"
  "lookup lookup 28 sharded table of embeddings in front of a mesh"
)

# The lines of a Rust program that count. An import may have several lines.
of_rust() {
  awk '/^use / { import = 1 } import { if (/;$/) import = 0; next } /^[ \t]*(\/\/.*)?$/ { next } { lines++ } END { print lines + 0 }' "$1"
}

# The lines of a Python program that count.
of_python() {
  python3 - "$1" <<'PY'
import ast, sys, tokenize

with open(sys.argv[1], "rb") as file:
    tree = ast.parse(file.read())
left_out = set()
for node in ast.walk(tree):
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if is_docstring or isinstance(node, (ast.Import, ast.ImportFrom)):
        left_out.update(range(node.lineno, node.end_lineno + 1))
ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
counted = set()
with open(sys.argv[1], "rb") as file:
    for token in tokenize.tokenize(file.readline):
        if token.type not in ignored:
            counted.update(range(token.start[0], token.end[0] + 1))
print(len(counted - left_out))
PY
}

failed=0
printf '%-64s %5s %8s %6s\n' program ours PyTorch most
for program in "${programs[@]}"; do
  read -r ours theirs most what <<<"$program"
  mine="examples/examples/$ours.rs" others="benchmarks/programs/$theirs.py"
  lines="$(of_rust "$mine")" of_theirs="$(of_python "$others")"
  printf '%-64s %5s %8s %6s\n' "$what" "$lines" "$of_theirs" "$most"
  [ "$lines" -gt 0 ] && [ "$of_theirs" -gt 0 ] || { echo "$mine or $others has no lines of code" >&2; failed=1; }
  if [ "$lines" -gt "$most" ]; then
    echo "$mine has $lines lines, at most $most are allowed" >&2
    failed=1
  fi
  grep -F "/$ours.rs)" docs/programs.md | grep -qF "| $lines | $of_theirs |" || { echo "docs/programs.md does not have | $lines | $of_theirs | for $mine" >&2; failed=1; }
done
exit "$failed"
