#!/usr/bin/env bash
# Compares the outputs shown in README.md and docs/programs.md with those of a new run.
# Usage: scripts/readme-numbers.sh [FOLDER OF THE BUILT PROGRAMS, by default target/release] [OF THE EXAMPLES, by default its examples]
#
# - A block ```text shows the output of the command in the block ```sh before it. (One after a block ```rust shows what that
#   program prints; its doctest asserts it.) Each row of its tables must be printed by
#   that command, under the same heads. Columns with a dot or a comma in a time or a rate (ms/step, tokens/s) must have a
#   number there, and so must threads; a loss may differ by 0.002, as the sums of another processor may; all else must be the same.
# - The sentences below `said` have numbers of a run in them.
set -euo pipefail
cd "$(dirname "$0")/.."
programs="$(cd "${1:-${CARGO_TARGET_DIR:-target}/release}" && pwd)"
examples="$(cd "${2:-$programs/examples}" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=0
fail() { echo "README.md: $*" >&2; failed=1; }

# The program of a `cargo run` line, and its flags.
program() {
  local place="$programs/toy-transformer"
  set -- ${1%%#*}
  [ "$1 $2" = "cargo run" ] || return 1
  shift 2
  while (($#)); do
    case "$1" in
      --release) shift ;;
      --bin) place="$programs/$2"; shift 2 ;;
      --example) place="$examples/$2"; shift 2 ;;
      --) shift; break ;;
      *) return 1 ;;
    esac
  done
  echo "$place" "$@"
}

# Writes each block ```text to $work/N.shown and the command before it to $work/N.command.
awk -v work="$work" '
  /^```/ { if (kind) { if (kind == "text") close(out); kind = ""; next }
           kind = substr($0, 4); if (kind == "") kind = "none"; if (kind == "sh") command = ""
           if (kind == "text" && last == "rust") kind = "none"
           last = kind
           if (kind == "text") { out = work "/" ++blocks ".shown"; printf "%s\n", command > (work "/" blocks ".command") }
           next }
  kind == "sh" { command = command (command == "" ? "" : "\n") $0 }
  kind == "text" { print > out }
' README.md

blocks=0
for shown in "$work"/*.shown; do
  [ -e "$shown" ] || break
  command="$(cat "${shown%.shown}.command")"
  run="$(program "$command")" || { fail "a block of text after no single command of cargo run: $command"; continue; }
  $run >"$work/printed" 2>"$work/errors" || { fail "$command fails: $(cat "$work/errors")"; continue; }
  awk -v command="$command" '
    # The cells of a row, without the spaces around them.
    function cells(line, into,  count, i) {
      gsub(/│|┆/, "|", line)
      count = split(line, into, "|")
      for (i = 1; i <= count; i++) { gsub(/^ +| +$/, "", into[i]) }
      return count
    }
    function plain(number) { gsub(/,/, "", number); return number }
    function number(text) { return plain(text) ~ /^[0-9]+(\.[0-9]+)?$/ }
    function same(head, a, b) {
      # Threads are the cores of the machine divided by the ranks.
      if (head ~ /^(ms|tokens|samples)\// || head == "threads") return number(a) && number(b)
      if (head ~ /loss/ && number(a) && number(b)) return (a - b) * (a - b) <= 0.002 * 0.002
      return a == b
    }
    !/^(│|\|)/ { if (/^┌/) heads = ""; next }
    heads == "" { count = cells($0, into); heads = ""; for (i = 1; i <= count; i++) heads = heads "|" into[i]; next }
    FNR == NR { key = heads; rows[key] = rows[key] (rows[key] == "" ? "" : "\n") $0; next }
    { compared++
      found = 0
      many = split(rows[heads], printed, "\n"); width = cells($0, mine); split(heads, head, "|")
      for (r = 1; r <= many && !found; r++) {
        if (cells(printed[r], theirs) != width) continue
        found = 1
        for (i = 1; i <= width; i++) if (!same(head[i + 1], mine[i], theirs[i])) found = 0
      }
      if (!found) { wrong = 1; print "README.md: " command " does not print\n" $0 "\nbut\n" rows[heads] }
    }
    END { if (!compared) { print "README.md: nothing to compare with " command; exit 1 } exit wrong }
  ' "$work/printed" "$shown" >&2 || failed=1
  blocks=$((blocks + 1))
done
((blocks)) || fail "there is no output of a program in it"

# What a sentence must be, by what a program prints.
said() { tr '\n' ' ' <docs/programs.md | grep -qF -- "$1" || { echo "docs/programs.md should say: $1" >&2; failed=1; }; }

said "$("$examples/sharded-table" | awk '
  /^a table of/ { table = $4 }
  /^step/ { bytes += $3 + $8; steps++ }
  END { printf "%.0f kB sent per step for a table of %.1f MB", bytes / steps / 1e3, table / 1e6 }')"
said "$("$programs/sharded-embedding" | awk '
  { gsub(/│|┆/, "|"); gsub(/,/, ""); split($0, cell, "|"); for (i in cell) gsub(/^ +| +$/, "", cell[i]) }
  cell[3] == "all" && cell[5] > most { most = cell[5] }
  cell[2] == "replicated tables" { dense = cell[5] }
  END { printf "it sends %.0f times fewer bytes than dense gradients", dense / most }')"

((failed)) || echo "README.md, docs/programs.md: the numbers of $blocks output blocks and 2 sentences are those of runs"
exit "$failed"
