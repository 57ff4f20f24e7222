#!/usr/bin/env bash
# Runs the conformance suite and the failure scenarios over MPI, oversubscribed on this host.
# Status 0: all passed, or MPI is missing and a line says so. Installs nothing.
set -uo pipefail
cd "$(dirname "$0")/.."

for tool in mpirun mpicc; do
    if ! command -v "$tool" >/dev/null; then
        echo "SKIPPED: no $tool on the path; install an MPI (Open MPI or MPICH) with its headers"
        exit 0
    fi
done

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 RUST_BACKTRACE=0
program=$(cargo test --workspace --features candle-dist/mpi --test mpi --no-run --message-format json |
    grep -o '"executable":"[^"]*/mpi-[^"]*"' | cut -d'"' -f4) || exit 1
oversubscribe=()
if mpirun --version | grep -q "Open MPI"; then oversubscribe=(--oversubscribe); fi
failed=0

# on RANKS ARGUMENT...: runs the program, at most two minutes; output in $out, status in $status.
on() {
    local ranks=$1
    shift
    out=$(timeout 120 mpirun "${oversubscribe[@]}" -n "$ranks" "$program" "$@" 2>&1)
    status=$?
}

# verdict NAME CONDITION...: prints a line, and the output if the condition does not hold.
verdict() {
    local name=$1
    shift
    if "$@"; then
        echo "ok      $name"
    else
        echo "FAILED  $name (status $status)"
        echo "$out"
        failed=$((failed + 1))
    fi
}

# heard_by RANKS TEXT: that many ranks heard the same, which contains the text, and mpirun failed in time.
heard_by() {
    local lines
    lines=$(echo "$out" | sed -n 's/^.*heard by [0-9]*: //p')
    [ "$status" -ne 0 ] && [ "$status" -ne 124 ] && [ "$(echo "$lines" | grep -cF "$2")" -eq "$1" ] &&
        [ "$(echo "$lines" | sort -u | wc -l)" -eq 1 ]
}
passed() { [ "$status" -eq 0 ]; }
ended() { [ "$status" -ne 0 ] && [ "$status" -ne 124 ]; }

for ranks in 2 4; do
    on "$ranks"
    echo "$out" | grep " cases on "
    verdict "all cases on $ranks ranks" passed
done
for ranks in 2 4; do
    for failure in op shape dtype reduction form; do
        on "$ranks" differ "$failure"
        verdict "another $failure on $ranks ranks" heard_by "$ranks" "($failure"
    done
    on "$ranks" differ told
    verdict "told on $ranks ranks" heard_by "$ranks" "failed: no such file"
    on "$ranks" end error
    verdict "an error on $ranks ranks" heard_by $((ranks - 1)) "rank $((ranks - 1)) failed: unsupported: cheese"
    on "$ranks" end panic
    verdict "a panic on $ranks ranks" heard_by $((ranks - 1)) "rank $((ranks - 1)) panicked: out of cheese"
    on "$ranks" end early
    verdict "a rank that returns on $ranks ranks" heard_by $((ranks - 1)) "rank $((ranks - 1)) returned"
    on "$ranks" end hang
    verdict "a hang on $ranks ranks" heard_by $((ranks - 1)) "waited longer than the timeout of 3s"
    # mpirun ends the others itself, so that not all come to say what they heard.
    on "$ranks" end killed
    verdict "a killed rank on $ranks ranks" ended
done
[ "$failed" -eq 0 ] && echo "all passed" || echo "$failed failed"
exit $((failed > 0))
