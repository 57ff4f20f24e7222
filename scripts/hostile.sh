#!/usr/bin/env bash
# Runs each attack of the project's tests: damaged files, two jobs in one folder, strangers on the network, hostile templates,
# threads that cannot start, faults at each call. Everything stays on the loopback interface. A test is an attack if its path has a
# module `hostile` or is one of those below.
# Usage: scripts/hostile.sh [MODULE], such as templates. The last line is `attacks N broke N`; the status is 1 if anything broke.
set -euo pipefail
cd "$(dirname "$0")/.."
out="$(mktemp)"
trap 'rm -f "$out"' EXIT
attacks=("hostile::${1:-}")
# Hosts with several addresses, the bound on values of programs, a start that fails half way, and a fault at each call of a program.
[ -n "${1:-}" ] || attacks+=(hosts:: store:: transfer::tests chaos::)
status=0
cargo test --features mpi --no-fail-fast --lib --tests -- "${attacks[@]}" --test-threads 1 --nocapture 2>&1 | tee "$out" || status=$?
# A test that counts nothing is one attack.
read -r tried broke skipped < <(awk '
  function end(is_broken) { if (!counted && !is_skipped) { tried++; broke += is_broken } else if (is_broken && !found) broke++; running = 0 }
  /^test [^ ]+ \.\.\./ { running = 1; counted = is_skipped = found = 0 }
  /attacks on .*: [0-9]+ broke [0-9]+$/ { counted = 1; tried += $(NF - 2); broke += $NF; found += $NF }
  /^SKIPPED / { is_skipped = 1; skipped++ }
  running && /(^|\.\.\. )ok$/ { end(0) }
  running && /(^|\.\.\. )FAILED$/ { end(1) }
  END { print tried + 0, broke + 0, skipped + 0 }' "$out")
if ((status != 0 && broke == 0)); then echo "the tests did not run"; exit "$status"; fi
echo "skipped $skipped"
echo "attacks $tried broke $broke"
((broke == 0 && tried > 0))
