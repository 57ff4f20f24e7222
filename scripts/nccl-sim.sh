#!/usr/bin/env bash
# Runs tests over NCCL on simulated GPUs. Needs cargo and a C compiler, no GPU and nothing of NVIDIA's.
#
# usage: scripts/nccl-sim.sh [--gpus N[,N..] | --shared] [--seeds N] [--starts N] [--first SEED]
#                            [--queues K[,K..]] [--ctas N[,N..]] [SUITE..]
#
# Builds the simulated driver (nccl-sim) and links the tests with it. Runs each SUITE on N simulated GPUs (default: 1, 2
# and 4 in turn) with each seed from SEED on (default: one seed, 0). A seed chooses the order in which the streams run.
# Each seed has a start of the program of its own, unless --starts says fewer: then the worlds of a start take its seeds
# in turn, and all seeds must be taken. Ranks that are processes take one seed per start.
# With --shared, ranks are threads that share one GPU over the threads backend, and each start takes one seed.
# GPUs have K hardware queues (default: what CUDA_DEVICE_MAX_CONNECTIONS says, or 8) and run N CTAs (default: 132) at once.
# A SUITE is a filter of candle-dist's tests (default: nccl::), CRATE/FILTER for those of another crate, or processes or
# processes/FILTER for ranks that are processes.
# The last line is "seeds N races N failed N": how many seeds were used, how many faults the simulator found, and how many
# runs failed. The status is 0 if the last two are 0, 2 if the arguments are wrong, and 1 otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/test-binary.sh

usage() {
  sed -n '4,16s/^# \{0,1\}//p' scripts/nccl-sim.sh >&2
  echo "error: $1" >&2
  exit 2
}
# number FLAG VALUE LEAST: prints the value, if it is a number from LEAST on.
number() {
  [[ "$2" =~ ^[0-9]{1,9}$ ]] && ((10#$2 >= $3)) || usage "$1 takes a number from $3 on, not '$2'"
  echo "$((10#$2))"
}
# numbers FLAG LIST: puts the numbers of a list into the array `listed`.
numbers() {
  listed=()
  local count
  for count in ${2//,/ }; do
    count="$(number "$1" "$count" 1)" || exit 2
    listed+=("$count")
  done
  [ ${#listed[@]} -gt 0 ] || usage "$1 lacks its value"
}
# Empty: the default.
queues=("") ctas=("")
gpus=(1 2 4) shared="" seeds=1 starts=0 first=0 suites=()
while [ $# -gt 0 ]; do
  case "$1" in
    --gpus | --seeds | --starts | --first | --queues | --ctas) [ $# -gt 1 ] || usage "$1 lacks its value" ;;&
    --gpus)
      numbers --gpus "$2"
      gpus=("${listed[@]}")
      shift
      ;;
    --shared) shared=1 gpus=(1) ;;
    --seeds) seeds="$(number --seeds "$2" 1)" || exit 2; shift ;;
    --starts) starts="$(number --starts "$2" 1)" || exit 2; shift ;;
    --queues) numbers --queues "$2"; queues=("${listed[@]}"); shift ;;
    --ctas) numbers --ctas "$2"; ctas=("${listed[@]}"); shift ;;
    --first) first="$(number --first "$2" 0)" || exit 2; shift ;;
    -h | --help) sed -n '2,16s/^# \{0,1\}//p' scripts/nccl-sim.sh; exit 0 ;;
    -*) usage "unknown flag $1" ;;
    *) suites+=("$1") ;;
  esac
  shift
done
if [ -n "$shared" ]; then
  [ "${gpus[*]}" = 1 ] || usage "--shared is for one GPU"
  [ "$starts" -eq 0 ] || usage "--shared takes each seed in a start of its own, without --starts"
  [[ " ${suites[*]-} " != *" processes"* ]] || usage "--shared is for threads"
fi
[ ${#suites[@]} -gt 0 ] || suites=(nccl::)
# The suites as CRATE/FILTER, and their crates.
crates=()
for at in "${!suites[@]}"; do
  [ "${suites[at]}" != processes ] || suites[at]="processes/"
  [[ "${suites[at]}" == */* ]] || suites[at]="candle-dist/${suites[at]}"
  crate="${suites[at]%%/*}"
  [ "$crate" = processes ] || [ -d "$crate/tests/suite" ] || usage "no crate $crate with tests in $crate/tests/suite"
  [[ " ${crates[*]-} " == *" $crate "* ]] || crates+=("$crate")
done

. scripts/sim-build.sh

# program CRATE TEST: builds a test of the crate, and prints the path of the program.
program() {
  executable "$2" test --quiet -p "$1" --features "$1/nccl,test-utils/nccl" --test "$2" --no-run
}
export CANDLE_TEST_BACKEND=nccl-sim
[ -z "$shared" ] || export CANDLE_TEST_BACKEND=threads CANDLE_TEST_DEVICE=cuda
declare -A programs
for suite in "${suites[@]}"; do
  crate="${suite%%/*}"
  if [ "$crate" = processes ]; then
    programs[$suite]="$(program test-utils processes)"
  else
    programs[$suite]="$(program "$crate" "$(binary_of "$crate" "${suite#*/}")")"
  fi
  [ -x "${programs[$suite]}" ] || { echo "error: the tests of $crate cannot be built" >&2; exit 1; }
  [ "$crate" != processes ] || continue
  # A filter that matches nothing would pass.
  listed="$("${programs[$suite]}" "${suite#*/}" --list 2>/dev/null | grep -c ': test$' || true)"
  [ "$listed" -gt 0 ] || usage "no test of ${suite%%/*} matches '${suite#*/}'"
  echo "$suite: $listed tests on ${gpus[*]} GPUs"
done

export SIM_REPORT="$folder/report"
log="$folder/log" failed=0 runs=0
: >"$SIM_REPORT"
: >"$folder/skipped"
# The starts, and how many seeds each has.
asked_starts=$starts
((starts > 0 && starts <= seeds)) || starts=$seeds
each=$(((seeds + starts - 1) / starts))
export SIM_USED="$folder/used" SIM_SEEDS=$each
: >"$SIM_USED"
[ -z "$shared" ] || seq "$first" "$each" $((first + seeds - 1)) >"$SIM_USED"
# run SEED GPUS SUITE QUEUES CTAS
run() {
  local seed="$1" count="$2" suite="$3" crate="${3%%/*}" status=0 card=""
  runs=$((runs + 1))
  place="$crate" arguments=("${suite#*/}" --test-threads 1)
  [ "$crate" != processes ] || place=test-utils arguments=("${suite#*/}")
  [ -z "$4" ] || card=", $4 queues"
  [ -z "$5" ] || card="$card, $5 CTAs"
  (
    cd "$place"
    [ -z "$4" ] || export SIM_QUEUES="$4" CUDA_DEVICE_MAX_CONNECTIONS="$4"
    [ -z "$5" ] || export SIM_CTAS="$5"
    SIM_SEED=$seed SIM_GPUS=$count timeout "${SIM_LIMIT:-900}" "${programs[$suite]}" "${arguments[@]}" >"$log" 2>&1
  ) || status=$?
  grep -a '^SKIPPED' "$log" | sed 's/ ([0-9]* skipped in this program)$//' >>"$folder/skipped" || true
  if [ "$status" -ne 0 ]; then
    failed=$((failed + 1))
    echo "FAILED $suite on $count GPUs with seed $seed$card (status $status; 124 means that it did not end):"
    tail -n 60 "$log"
  fi
}
for seed in $(seq "$first" "$each" $((first + seeds - 1))); do
  for count in "${gpus[@]}"; do
    for suite in "${suites[@]}"; do
      for queue_count in "${queues[@]}"; do
        for cta_count in "${ctas[@]}"; do run "$seed" "$count" "$suite" "$queue_count" "$cta_count"; done
      done
    done
  done
done
sort "$folder/skipped" | uniq -c | sort -rn | head -n 60
echo "runs $runs, tests or cases skipped $(wc -l <"$folder/skipped")"
# A deadlock has a line for each stream.
races="$(grep -c '^nccl-sim: ' "$SIM_REPORT" || true)"
[ "$races" -eq 0 ] || awk '!seen[$0]++' "$SIM_REPORT" | head -n 40
used="$(sort -u "$SIM_USED" | wc -l)"
# Worlds that share a start may be fewer than its seeds. Processes take one seed per start.
if ((asked_starts > 0 && used < seeds)) && [ "${crates[*]}" != processes ]; then
  echo "error: the worlds took $used of $seeds seeds; ask for fewer, or for more starts" >&2
  failed=$((failed + 1))
fi
echo "seeds $used races $races failed $failed"
[ "$races" -eq 0 ] && [ "$failed" -eq 0 ]
