#!/usr/bin/env bash
# Runs each attack of the project's tests: damaged files, two jobs in one folder, strangers on the network, hostile templates,
# threads that cannot start. Everything stays on the loopback interface. A test is an attack if its path has a module `hostile`.
# Usage: scripts/hostile.sh [MODULE], such as templates. The last line is `attacks N broke N`; the status is 1 if anything broke.
set -euo pipefail
cd "$(dirname "$0")/.."
out="$(mktemp)"
trap 'rm -f "$out"' EXIT
status=0
cargo test --features mpi --no-fail-fast --tests -- "hostile::${1:-}" --test-threads 1 --nocapture 2>&1 | tee "$out" || status=$?
tried="$(sed -nE 's/.*attacks on .*: ([0-9]+) broke [0-9]+$/\1/p' "$out" | awk "{sum += \$1} END {print sum + 0}")"
broke="$(sed -nE 's/.*attacks on .*: [0-9]+ broke ([0-9]+)$/\1/p' "$out" | awk "{sum += \$1} END {print sum + 0}")"
# A test that failed without counting is an attack that broke something.
failed="$(sed -nE 's/^test result: .* ([0-9]+) failed;.*/\1/p' "$out" | awk "{sum += \$1} END {print sum + 0}")"
if ((${failed:-0} > ${broke:-0})); then broke="$failed"; fi
if ((status != 0 && ${broke:-0} == 0)); then echo "the tests did not run"; exit "$status"; fi
echo "attacks ${tried:-0} broke ${broke:-0}"
((${broke:-0} == 0 && ${tried:-0} > 0))
