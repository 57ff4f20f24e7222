#!/usr/bin/env bash
# Runs tests with processes as ranks, over MPI, oversubscribed on this host. Installs nothing.
#
# usage: scripts/mpi-suites.sh [--ranks N[,N..]] [--limit SECONDS] [SUITE..]
#
# Each SUITE is CRATE/FILTER: the tests of CRATE whose names contain FILTER. All of them run on N processes (default: 2, 3
# and 4 in turn), which must end within the limit (default: 1800 seconds). Each process runs every test, and is one rank
# of each world. A world with more ranks than processes runs as threads, and its test counts as skipped.
# Without a SUITE, these run: candle-shard/ with ops:: embedding:: fsdp:: checkpoint:: redistribute:: gradient_rule:: moe::
# context::, and candle-pipe/runtime::. A SUITE without a world fails, because it tests nothing between processes.
# The last line is "runs N failed N skipped N": skipped counts the tests of all runs. The status is 0 if none failed, 2 if
# the arguments are wrong, and 1 otherwise. Where no MPI is installed, it says so, and the status is 0.
set -uo pipefail
cd "$(dirname "$0")/.."

usage() {
    sed -n '4,13s/^# \{0,1\}//p' scripts/mpi-suites.sh >&2
    echo "error: $1" >&2
    exit 2
}
# number FLAG VALUE: prints the value, if it is a number from 1 on.
number() {
    [[ "$2" =~ ^[0-9]{1,6}$ ]] && ((10#$2 >= 1)) || usage "$1 takes a number from 1 on, not '$2'"
    echo "$((10#$2))"
}
ranks=(2 3 4) limit=1800 suites=()
while [ $# -gt 0 ]; do
    case "$1" in
    --ranks | --limit) [ $# -gt 1 ] || usage "$1 lacks its value" ;;&
    --ranks)
        ranks=()
        for count in ${2//,/ }; do
            count=$(number --ranks "$count") || exit 2
            ranks+=("$count")
        done
        [ ${#ranks[@]} -gt 0 ] || usage "--ranks lacks its value"
        shift
        ;;
    --limit)
        limit=$(number --limit "$2") || exit 2
        shift
        ;;
    -h | --help)
        sed -n '2,13s/^# \{0,1\}//p' scripts/mpi-suites.sh
        exit 0
        ;;
    -*) usage "unknown flag $1" ;;
    *) suites+=("$1") ;;
    esac
    shift
done
[ ${#suites[@]} -gt 0 ] || suites=(candle-shard/{ops,embedding,fsdp,checkpoint,redistribute,gradient_rule,moe,context}::
    candle-pipe/runtime::)
crates=()
for suite in "${suites[@]}"; do
    crate=${suite%%/*}
    [[ $suite == */* && -d $crate/tests/suite ]] || usage "'$suite' is not CRATE/FILTER with tests in CRATE/tests/suite"
    [[ " ${crates[*]-} " == *" $crate "* ]] || crates+=("$crate")
done
. scripts/mpi-launch.sh
. scripts/test-binary.sh

# The same build as that of the tests in .ci/run, so that no crate is built twice.
declare -A binaries programs
targets=()
for suite in "${suites[@]}"; do
    binaries[$suite]=$(binary_of "${suite%%/*}" "${suite#*/}")
    [[ " ${targets[*]-} " == *" ${binaries[$suite]} "* ]] || targets+=(--test "${binaries[$suite]}")
done
built=$(cargo test --locked --quiet --features mpi "${targets[@]}" --no-run --message-format json) || exit 1
for suite in "${suites[@]}"; do
    crate=${suite%%/*}
    programs[$suite]=$(grep "/$crate/Cargo.toml\"" <<<"$built" | grep -o "\"executable\":\"[^\"]*/${binaries[$suite]}-[^\"]*\"" | cut -d'"' -f4)
    [ -x "${programs[$suite]}" ] || { echo "error: the tests of $crate cannot be built" >&2; exit 1; }
    # A filter that matches nothing would pass.
    listed=$("${programs[$suite]}" "${suite#*/}" --list 2>/dev/null | grep -c ': test$')
    [ "$listed" -gt 0 ] || usage "no test of ${suite%%/*} matches '${suite#*/}'"
done

# Random cases must be the same on all processes. Each run takes others.
export CANDLE_TEST_BACKEND=mpi PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-$((RANDOM * 32768 + RANDOM))}
echo "PROPTEST_RNG_SEED=$PROPTEST_RNG_SEED"
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
# The ranks' output in a file each: mpirun would mix their lines.
apart='exec "$@" >"$TMPDIR/rank.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" 2>&1'
runs=0 failed=0 skipped=0
: >"$TMPDIR/skipped"
for count in "${ranks[@]}"; do
    for suite in "${suites[@]}"; do
        crate=${suite%%/*} began=$SECONDS
        runs=$((runs + 1))
        for _ in 1 2 3; do
            rm -f "$TMPDIR"/rank.*
            said=$(cd "$crate" && launched "$limit" -n "$count" bash -c "$apart" rank "${programs[$suite]}" "${suite#*/}" \
                --test-threads 1 --color never 2>&1)
            status=$?
            [ "$status" -eq 125 ] || break
            echo "again: mpirun hung after all ranks had ended"
        done
        worlds=$(grep -sa '^worlds of processes [1-9]' "$TMPDIR/rank.0")
        passed=$(grep -sal '^test result: ok' "$TMPDIR"/rank.* | wc -l)
        left_out=$(grep -sac '^SKIPPED ' "$TMPDIR/rank.0")
        skipped=$((skipped + left_out))
        if [ "$status" -eq 0 ] && [ "$passed" -eq "$count" ] && [ -n "$worlds" ]; then
            echo "ok      $suite on $count processes: $worlds, skipped $left_out, $((SECONDS - began)) s"
        else
            failed=$((failed + 1))
            echo "FAILED  $suite on $count processes (status $status; 124 means that it did not end)"
            echo "$said"
            tail -n 100 "$TMPDIR"/rank.*
        fi
        grep -sa '^SKIPPED ' "$TMPDIR/rank.0" | sed 's/ ([0-9]* skipped in this program)$//' >>"$TMPDIR/skipped"
    done
done
sed 's/^SKIPPED [^ ]*: //' "$TMPDIR/skipped" | sort | uniq -c | sort -rn | head -n 30
echo "runs $runs failed $failed skipped $skipped"
[ "$failed" -eq 0 ]
