#!/usr/bin/env bash
# Runs the conformance suite, the failure scenarios and the programs over MPI, oversubscribed on this host.
# The exit status is 0 if all passed, or if MPI is missing, which it prints. Installs nothing.
set -uo pipefail
cd "$(dirname "$0")/.."

. scripts/mpi-launch.sh
export RUST_BACKTRACE=0
# Building the tests of a program builds all programs. The features are those of the tests in .ci/run.
built=$(cargo test --features mpi --test mpi --test launched --test suite --no-run --message-format json |
    grep -o '"executable":"[^"]*"' | cut -d'"' -f4) || exit 1
# built NAME: the path of the executable with this name.
built() { echo "$built" | grep -E "/$1(-[0-9a-f]{16})?$"; }
program=$(built mpi)
failed=0

# on RANKS ARGUMENT...: runs the program for at most ten minutes. Its input is the file $input, its output is in $out, and
# its status in $status.
on() { retried once "$@"; }
once() {
    local ranks=$1
    shift
    out=$(launched 600 -n "$ranks" "$program" "$@" 2>&1 <"${input:-/dev/null}")
    status=$?
}
# retried COMMAND...: runs a command that sets $status, and again where mpirun hung after all ranks had ended; three times at most.
retried() {
    for _ in 1 2 3; do
        "$@"
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

# Scenarios spend most of their time waiting: for mpirun, for a timeout, for a rank that is silent. So several run at a
# time, and `settle` prints their verdicts in order.
slots=$(($(nproc) + 1)) said=$(mktemp -d) asked=0
trap 'rm -rf "$said"' EXIT
# aside COMMAND...: runs a command that ends in a verdict, beside others.
aside() {
    while [ "$(jobs -rp | wc -l)" -ge "$slots" ]; do wait -n; done
    asked=$((asked + 1))
    "$@" >"$said/$asked" 2>&1 &
}
settle() {
    wait
    for ((nth = 1; nth <= asked; nth++)); do
        # A scenario without a verdict has failed, too.
        grep -qE "^(ok|FAILED) " "$said/$nth" || echo "FAILED  scenario $nth" >>"$said/$nth"
        cat "$said/$nth"
        failed=$((failed + $(grep -c "^FAILED " "$said/$nth")))
    done
    asked=0
}
# scenario NAME RANKS ARGUMENT... -- CONDITION...: what the program does on these ranks, and what must hold then.
scenario() {
    local name=$1 ranks=$2 arguments=()
    shift 2
    while [ "$1" != -- ]; do
        arguments+=("$1")
        shift
    done
    shift
    on "$ranks" "${arguments[@]}"
    verdict "$name" "$@"
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

out=$(timeout 900 cargo test --features mpi --lib backend::mpi -- --test-threads 1 2>&1)
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
for ranks in 2 3; do
    on "$ranks" late
    verdict "a start on $ranks ranks may take longer than a call" passed
done
# port: a port that is likely to be free, for starts that need one.
port() { echo $((20000 + RANDOM % 10000)); }
aside scenario "the launcher's ranks in another order than MPI's" 3 begin order "$(port)" -- \
    heard_by 3 "start all ranks with one mpirun"
for ranks in 2 3; do
    begin() { aside scenario "$1 on one of $ranks ranks" "$ranks" begin "$2" "$(port)" -- heard_by "$ranks" "$3"; }
    begin "an MPI for one thread" level "start it with MPI_THREAD_MULTIPLE"
    begin "a communicator that is not given" missing "pass its communicator to the backend"
    begin "other settings" settings "most_bytes 1048576"
    begin "messages that are too small" range "messages of 1 bytes"
done
for ranks in 2 4 8; do
    aside scenario "a tensor on a GPU on $ranks ranks" "$ranks" device -- \
        heard_by "$ranks" "on Cuda { gpu_id: 0 } over MPI; move them"
    differ() { aside scenario "another $1 on $ranks ranks" "$ranks" differ "$1" -- heard_by "$ranks" "$2"; }
    for failure in op shape dtype reduction form; do differ "$failure" "($failure"; done
    for failure in root_of_broadcast root_of_large_broadcast root_of_reduce root_of_large_reduce root_of_gather \
        root_of_scatter own_root_of_reduce own_root_of_broadcast; do
        differ "$failure" "(root differs)"
    done
    differ broadcast_against_reduce "(op differs)"
    differ told "failed: no such file"
    ends() { aside scenario "$1 on $ranks ranks" "$ranks" end "$2" -- heard_by $((ranks - 1)) "$3"; }
    ends "an error" error "rank $((ranks - 1)) failed: unsupported: cheese"
    ends "a panic" panic "rank $((ranks - 1)) panicked: out of cheese"
    ends "a rank that returns" early "rank $((ranks - 1)) returned"
    ends "a hang" hang "waited longer than the timeout of 5s"
    # mpirun itself ends the others, so not all of them print the error.
    aside scenario "a killed rank on $ranks ranks" "$ranks" end killed -- ended
done
settle

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
# some NAME: the program on two ranks, of which only the second one has a variable.
some() {
    out=$(launched 600 -n 1 "$program" --backend mpi --steps 3 --runs tp : \
        -n 1 env "$1=1" "$program" --backend mpi --steps 3 --runs tp 2>&1 </dev/null)
    status=$?
}
for name in CANDLE_DIST_DEBUG CANDLE_SHARD_STRICT; do
    some "$name"
    verdict "toy-transformer where only rank 1 has $name" said_once "One run only"
done
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
            tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -q "^CANDLE_DIST_TOKEN=$2$"; then
            echo "$pid"
            return
        fi
    done
    return 1
}
# fate SIGNAL RANK: runs the program on 4 ranks and sends one of them a signal while rank 0 trains alone.
fate() {
    local log pid first token="the fate of one rank, $$-$1-$2"
    log=$(mktemp)
    CANDLE_DIST_TOKEN=$token launched 120 -n 4 \
        "$program" --backend mpi --tp 4 --runs single,tp --steps 1000000 >"$log" 2>&1 &
    local job=$!
    for _ in $(seq 300); do
        pid=$(pid_of "$2" "$token") && first=$(pid_of 0 "$token") && break
        sleep 0.1
    done
    # A process that still waits for others takes no time of a processor, but one that trains does.
    for _ in $(seq 600); do
        (($(awk '{ print $14 + $15 }' "/proc/$first/stat" 2>/dev/null || echo 999) > 200)) && break
        sleep 0.1
    done
    kill "-$1" "$pid"
    wait "$job"
    status=$?
    out=$(<"$log")
    rm -f "$log"
}
# blamed RANK: mpirun failed in time, and a single process printed the reason once. Without rank 0, nobody tells the others
# who speaks: one that mpirun has not ended after a second prints the reason as well.
blamed() {
    local errors blames most=1
    errors=$(echo "$out" | grep -c "^error: ")
    blames=$(echo "$out" | grep -c "^error: .*rank $1 was lost")
    [ "$1" -ne 0 ] || most=3
    ended && [ "$blames" -eq "$errors" ] && [ "$blames" -ge 1 ] && [ "$blames" -le "$most" ]
}
# lost SIGNAL RANK: the verdict on a rank that gets a signal.
lost() {
    retried fate "$1" "$2"
    verdict "toy-transformer whose rank $2 gets SIG$1" blamed "$2"
}
for rank in 0 1 2 3; do
    for signal in STOP KILL; do aside lost "$signal" "$rank"; done
done
settle

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
input=
verdict "lm --pp 2 on 2 ranks" same "$text"

# Trainings that go on: all ranks take the last checkpoint that is whole, or none goes on.
place=$(mktemp -d)
trap 'rm -rf "$said" "$place"' EXIT
for i in $(seq 60); do echo "$i sheep jump over $((i * i % 17)) fences."; done >"$place/text"
# saves: a training that makes the folder anew.
saves() {
    rm -rf "$place/whole"
    once 2 train --backend mpi --tp 2 --train "$place/text" --batch 2 --seq-len 8 --steps 4 --save "$place/whole" --save-every 2
}
retried saves
verdict "lm train --save on 2 ranks" passed
# last_loss: the loss of the last step in $out.
last_loss() { echo "$out" | grep -oE "^step 5 of 5: loss [0-9.]+"; }
out=$(timeout 600 "$program" train --tp 2 --train "$place/text" --resume "$place/whole/step-00000002" --steps 5 2>&1 </dev/null)
want=$(last_loss)
# went_on: said once, the training went on from step 2, with the losses of threads.
went_on() { said_once "goes on from step 2." && [ -n "$want" ] && [ "$(last_loss)" = "$want" ]; }
# Ways to damage the step 4 of a folder.
flipped() { printf XX | dd of="$1/model.safetensors" bs=1 seek="$(($(stat -c %s "$1/model.safetensors") - 5))" conv=notrunc status=none; }
cut_short() { truncate -s 1000 "$1/optimizer/optimizer.safetensors"; }
emptied() { rm -rf "${1:?}"/*; }
for damage in flipped cut_short emptied; do
    cp -r "$place/whole" "$place/$damage"
    "$damage" "$place/$damage/step-00000004"
    on 2 train --backend mpi --tp 2 --train "$place/text" --resume "$place/$damage" --steps 5
    verdict "lm train --resume where the last step is $damage, on 2 ranks" went_on
done
# The two ranks are in folders of their own, and rank 1 has another step 2 or none.
mkdir "$place/a" "$place/b"
cp -r "$place/flipped" "$place/a/saved"
cp "$place/text" "$place/a"
cp "$place/text" "$place/b"
# apart ARGUMENT...: trains on two ranks, each in a folder of its own.
apart() {
    local arguments=("$program" train --backend mpi --tp 2 --train text "$@")
    out=$(launched 120 -n 1 -wdir "$place/a" "${arguments[@]}" : -n 1 -wdir "$place/b" "${arguments[@]}" 2>&1 </dev/null)
    status=$?
}
# told TEXT: mpirun failed in time, and a single rank printed one error, which has the text.
told() { ended && [ "$(echo "$out" | grep -c "^error: ")" -eq 1 ] && echo "$out" | grep -qF -- "$1"; }
apart --resume saved --steps 5
verdict "lm train --resume where rank 1 lacks the folder" told "rank 1 on $(uname -n): --resume saved is no folder"
cp -r "$place/whole" "$place/b/saved"
cp "$place/whole/step-00000004/training.json" "$place/b/saved/step-00000002"
apart --resume saved --steps 5
verdict "lm train --resume where rank 1 has another step" told "is a checkpoint of step 4 here, and another one where rank 0 runs"
apart --save new --steps 1
verdict "lm train --save where rank 1 has another folder" told "--save new is not the folder that rank 0 writes to"

# signaled SIGNAL RANK: a training of which one rank gets a signal when some steps are made.
signaled() {
    local log="$place/signaled.log" token="a training that is stopped, $$-$1-$2" pid
    rm -rf "$place/signaled" "$log"
    CANDLE_DIST_TOKEN=$token launched 120 -n 2 "$program" --backend mpi --tp 2 --train "$place/text" --batch 2 --seq-len 8 \
        --steps 1000000 --save "$place/signaled" --log "$log" >"$place/signaled.out" 2>&1 </dev/null &
    local job=$!
    for _ in $(seq 600); do
        [ "$(wc -l 2>/dev/null <"$log" || echo 0)" -ge 3 ] && break
        sleep 0.1
    done
    pid=$(pid_of "$2" "$token") && kill "-$1" "$pid"
    wait "$job"
    status=$?
    out=$(<"$place/signaled.out")
}
# stopped: all ranks ended in order after one step, with its checkpoint.
stopped() {
    local steps
    steps=$(wc -l <"$place/signaled.log")
    [ "$status" -eq 0 ] && said_once "Stopped by a signal after step $steps: --resume goes on." &&
        [ -f "$place/signaled/$(printf 'step-%08d' "$steps")/training.json" ]
}
for rank in 0 1; do
    retried signaled TERM "$rank"
    verdict "lm train of which rank $rank gets SIGTERM, on 2 ranks" stopped
done
retried signaled INT 1
verdict "lm train of which rank 1 gets SIGINT, on 2 ranks" stopped

# full: the training goes on where a part of the room for its next checkpoint is left, and again when there is room.
full() {
    out=$(unshare --mount bash -c '
        . scripts/mpi-launch.sh
        program=$1 place=$2 part=$3 room=$(du -sb "$2/whole/step-00000002" | cut -f1)
        mkdir -p "$place/disk" && mount -t tmpfs -o "size=$((4 * room))" none "$place/disk" || exit 3
        mkdir "$place/disk/saved" && cp -r "$place/whole/step-00000002" "$place/disk/saved"
        head -c $((4 * room)) /dev/zero >"$place/disk/filler" 2>/dev/null
        truncate -s $(($(stat -c %s "$place/disk/filler") - room * part / 4)) "$place/disk/filler"
        for _ in 1 2; do
            launched 120 -n 2 "$program" train --backend mpi --tp 2 --train "$place/text" --batch 2 --seq-len 8 --steps 4 \
                --resume "$place/disk/saved" --save "$place/disk/saved" --save-every 2
            echo "status $?:" $(ls "$place/disk/saved")
            rm -f "$place/disk/filler"
        done' full "$program" "$place" "$1" 2>&1 </dev/null)
    status=0
    if echo "$out" | grep -q "^status 125:"; then status=125; fi
}
# kept: the first training left the checkpoint alone and said why, and the second one went on.
kept() {
    [ "$(echo "$out" | grep -c "^error: .*No space left on device")" -eq 1 ] &&
        echo "$out" | grep -qE "^status [1-9][0-9]*: step-00000002$" &&
        echo "$out" | grep -qE "^status 0: step-00000002 step-00000004$"
}
if unshare --mount mount -t tmpfs none "$place" 2>/dev/null; then
    for part in 0 2; do
        retried full "$part"
        verdict "lm train --save on a disk with room for $part/4 of a checkpoint, on 2 ranks" kept
    done
else
    echo "SKIPPED: no disk of its own can be mounted here"
fi

[ "$failed" -eq 0 ] && echo "all passed" || echo "$failed failed"
exit $((failed > 0))
