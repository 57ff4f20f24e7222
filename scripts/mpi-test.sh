#!/usr/bin/env bash
# Runs the conformance suite, the failure scenarios and the programs over MPI, oversubscribed on this host.
# The exit status is 0 if all passed, or if MPI is missing, which it prints. Installs nothing.
set -uo pipefail
cd "$(dirname "$0")/.."

for tool in mpirun mpicc pgrep pkill; do
    if ! command -v "$tool" >/dev/null; then
        echo "SKIPPED: no $tool on the path; install an MPI (Open MPI or MPICH) with its headers, and procps"
        exit 0
    fi
done

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 RUST_BACKTRACE=0
# Building the tests of a program builds all programs.
built=$(cargo test --workspace --features mpi --test mpi --test launched --no-run --message-format json |
    grep -o '"executable":"[^"]*"' | cut -d'"' -f4) || exit 1
# built NAME: the path of the executable with this name.
built() { echo "$built" | grep -E "/$1(-[0-9a-f]{16})?$"; }
program=$(built mpi)
oversubscribe=()
if mpirun --version | grep -q "Open MPI"; then oversubscribe=(--oversubscribe); fi
failed=0

# launched SECONDS ARGUMENT...: runs mpirun with these arguments and prints its output. Returns its status, 124 if it took
# longer, or 125 if it hung although no rank was left: the PMIx library of some versions deadlocks when mpirun ends.
launched() {
    local seconds=$1 launcher began=$SECONDS alone=$SECONDS looks=0
    shift
    exec 3<&0 # a command in the background would read nothing otherwise
    mpirun "${oversubscribe[@]}" "$@" <&3 &
    launcher=$!
    exec 3<&-
    while kill -0 "$launcher" 2>/dev/null; do
        if ((++looks % 20 == 0)) && pgrep -P "$launcher" >/dev/null; then alone=$SECONDS; fi
        if ((SECONDS - began > seconds || SECONDS - alone > 30)); then
            pkill -KILL -P "$launcher"
            kill -KILL "$launcher"
            wait "$launcher" 2>/dev/null
            return $((SECONDS - alone > 30 ? 125 : 124))
        fi
        sleep 0.05
    done
    wait "$launcher"
}

# on RANKS ARGUMENT...: runs the program for at most ten minutes. Its input is the file $input, its output is in $out, and
# its status in $status.
on() {
    local ranks=$1
    shift
    for _ in 1 2 3; do
        out=$(launched 600 -n "$ranks" "$program" "$@" 2>&1 <"${input:-/dev/null}")
        status=$?
        [ "$status" -eq 125 ] || break
        echo "again   mpirun hung after all ranks had ended"
    done
}

# verdict NAME CONDITION...: prints the result, and the output if the condition does not hold.
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

# heard_by RANKS TEXT: this many ranks got the same error, which contains the text, and mpirun failed in time.
heard_by() {
    local lines
    lines=$(echo "$out" | sed -n 's/^.*heard by [0-9]*: //p')
    [ "$status" -ne 0 ] && [ "$status" -ne 124 ] && [ "$(echo "$lines" | grep -cF "$2")" -eq "$1" ] &&
        [ "$(echo "$lines" | sort -u | wc -l)" -eq 1 ]
}
passed() { [ "$status" -eq 0 ]; }
ended() { [ "$status" -ne 0 ] && [ "$status" -ne 124 ]; }

out=$(timeout 900 cargo test --workspace --features mpi --lib backend::mpi -- --test-threads 1 2>&1)
status=$?
verdict "the unit tests of the backend" passed
for ranks in 2 4 8; do
    on "$ranks"
    echo "$out" | grep " cases on "
    verdict "all cases on $ranks ranks" passed
done
on 3 parts
verdict "all cases in messages of few bytes on 3 ranks" passed
for ranks in 2 3; do
    on "$ranks" apart
    verdict "all cases without shared memory on $ranks ranks" passed
done
for ranks in 3 4; do
    on "$ranks" pairs
    verdict "all cases with memory that pairs of $ranks ranks share" passed
done
on 2 given
verdict "all cases on an MPI that the program started" passed
for ranks in 2 3; do
    on "$ranks" large
    verdict "a tensor in 20,000 parts on $ranks ranks" passed
done
for ranks in 3 4 5 8; do
    on "$ranks" any
    verdict "sums in any order on $ranks ranks" passed
done
on 2 dropped
verdict "a finished call that is dropped frees its memory" passed
# port: a port that is likely to be free, for starts that need one.
port() { echo $((20000 + RANDOM % 10000)); }
on 3 begin order "$(port)"
verdict "the launcher's ranks in another order than MPI's" heard_by 3 "start all ranks with one mpirun"
for ranks in 2 3; do
    on "$ranks" begin level "$(port)"
    verdict "an MPI for one thread on one of $ranks ranks" heard_by "$ranks" "start it with MPI_THREAD_MULTIPLE"
    on "$ranks" begin missing "$(port)"
    verdict "a communicator that one of $ranks ranks does not give" heard_by "$ranks" "pass its communicator to the backend"
    on "$ranks" begin settings "$(port)"
    verdict "other settings on one of $ranks ranks" heard_by "$ranks" "most_bytes 1048576"
    on "$ranks" begin range "$(port)"
    verdict "messages that are too small on one of $ranks ranks" heard_by "$ranks" "messages of 1 bytes"
done
for ranks in 2 4 8; do
    on "$ranks" device
    verdict "a tensor on a GPU on $ranks ranks" heard_by "$ranks" "on Cuda { gpu_id: 0 } over MPI; move them"
    for failure in op shape dtype reduction form; do
        on "$ranks" differ "$failure"
        verdict "another $failure on $ranks ranks" heard_by "$ranks" "($failure"
    done
    for failure in root_of_broadcast root_of_large_broadcast root_of_reduce root_of_large_reduce root_of_gather \
        root_of_scatter own_root_of_reduce own_root_of_broadcast; do
        on "$ranks" differ "$failure"
        verdict "another $failure on $ranks ranks" heard_by "$ranks" "(root differs)"
    done
    on "$ranks" differ broadcast_against_reduce
    verdict "broadcast against reduce on $ranks ranks" heard_by "$ranks" "(op differs)"
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
    # mpirun itself ends the others, so not all of them print the error.
    on "$ranks" end killed
    verdict "a killed rank on $ranks ranks" ended
done

# agree: the program found that its runs agree, and printed this only once.
agree() { passed && [ "$(echo "$out" | grep -c "The runs agree.")" -eq 1 ]; }
# said_once TEXT: the program succeeded, and its output has the text once.
said_once() { passed && [ "$(echo "$out" | grep -cF -- "$1")" -eq 1 ]; }
# refused TEXT: the status is 2, and a single rank printed one sentence, which contains the text.
refused() { [ "$status" -eq 2 ] && [ "$(echo "$out" | grep -c "^error: ")" -eq 1 ] && echo "$out" | grep -qF -- "$1"; }
# same TEXT: the program succeeded, and its output has the text.
same() { passed && [ -n "$1" ] && echo "$out" | grep -qF -- "$1"; }

program=$(built toy-transformer)
on 2 --backend mpi --steps 10
verdict "toy-transformer on 2 ranks" agree
on 4 --backend mpi --steps 10 --pp 2 --tp 2
verdict "toy-transformer --pp 2 --tp 2 on 4 ranks" agree
on 3 --backend mpi --steps 10
verdict "toy-transformer on 3 ranks, where 2 are wanted" refused "--tp 2 takes 2 ranks, but the launcher started 3"
on 2 --backend mpi --steps 0
verdict "toy-transformer without steps" refused "--steps is 0"
on 2 --help
verdict "toy-transformer --help, once" said_once "Exit status: 0"
on 2 --backend mpi --steps 10 --json /dev/full
verdict "toy-transformer that cannot write its results" ended
out=$(for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) \
        timeout 60 "$program" --backend mpi --steps 10 || echo "status $?" &
done 2>&1; wait)
status=$(echo "$out" | grep -c "^status 2$")
alone() { [ "$status" -eq 2 ] && [ "$(echo "$out" | grep -c "^error: ")" -eq 1 ] && echo "$out" | grep -qF "use mpirun"; }
verdict "toy-transformer without mpirun" alone

# pid_of RANK JOB: the process of that rank among the descendants of mpirun.
pid_of() {
    local pid
    for pid in $(pgrep -f -- "$program --backend mpi"); do
        if tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qE "^(OMPI_COMM_WORLD_RANK|PMI_RANK)=$1$" &&
            tr '\0' '\n' <"/proc/$pid/environ" | grep -q "^CANDLE_DIST_TOKEN=$2$"; then
            echo "$pid"
            return
        fi
    done
    return 1
}
# fate SIGNAL RANK: runs the program on 4 ranks and sends one of them a signal while rank 0 trains alone.
fate() {
    local log pid token="fate-$$-$1-$2"
    log=$(mktemp)
    CANDLE_DIST_TOKEN=$token launched 120 -n 4 \
        "$program" --backend mpi --tp 4 --runs single,tp --steps 1000000 >"$log" 2>&1 &
    local job=$!
    for _ in $(seq 100); do
        pid=$(pid_of "$2" "$token") && break
        sleep 0.1
    done
    sleep 4
    kill "-$1" "$pid"
    wait "$job"
    status=$?
    out=$(<"$log")
    rm -f "$log"
}
# blamed RANK: mpirun failed in time, and a single process printed the reason once.
blamed() { ended && [ "$(echo "$out" | grep -c "^error: .*rank $1 was lost")" -eq 1 ] && [ "$(echo "$out" | grep -c "^error: ")" -eq 1 ]; }
for rank in 0 1 2 3; do
    for signal in STOP KILL; do
        fate "$signal" "$rank"
        verdict "toy-transformer whose rank $rank gets SIG$signal" blamed "$rank"
    done
done

program=$(built bench-collectives)
for ranks in 2 3; do
    on "$ranks" --backend mpi --world "$ranks" --sizes 28,4KiB,1MiB --rounds 3
    verdict "bench-collectives on $ranks ranks" said_once "$ranks ranks, each a process"
done
program=$(built sharded-embedding)
on 2 --backend mpi --steps 10
verdict "sharded-embedding on 2 ranks" agree
program=$(built lm)
text=$("$program" --tp 2 --max-tokens 8 --json - 2>/dev/null </dev/null | grep '"text"')
on 2 --backend mpi --tp 2 --max-tokens 8 --json -
verdict "lm --tp 2 on 2 ranks" same "$text"
text=$(echo "From a pipe" | "$program" --pp 2 --tp 1 --max-tokens 8 --json - 2>/dev/null | grep '"text"')
input=$(mktemp)
echo "From a pipe" >"$input"
on 2 --backend mpi --pp 2 --tp 1 --max-tokens 8 --json -
rm -f "$input"
verdict "lm --pp 2 on 2 ranks" same "$text"

[ "$failed" -eq 0 ] && echo "all passed" || echo "$failed failed"
exit $((failed > 0))
