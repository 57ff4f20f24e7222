#!/usr/bin/env bash
# Runs the tests of the NCCL backend on simulated GPUs. Needs no GPU and nothing of NVIDIA's.
#
# usage: scripts/nccl-sim.sh [--gpus N] [--seeds N] [--first SEED] [SUITE..]
#
# Builds the simulated driver (nccl-sim) and links the tests with it. Runs each SUITE, which is a filter of the tests of
# candle-dist (default: nccl::), on N simulated GPUs (default: 1, 2 and 4 in turn) with each seed. A seed chooses
# the order in which the streams run. The last line is "seeds N races N failed N": how many seeds ran, how many faults
# the simulator found, and how many runs failed. The status is 0 if the last two are 0.
set -euo pipefail
cd "$(dirname "$0")/.."
gpus="1 2 4" seeds=1 first=0 suites=()
while [ $# -gt 0 ]; do
  case "$1" in
    --gpus) gpus="$2"; shift ;;
    --seeds) seeds="$2"; shift ;;
    --first) first="$2"; shift ;;
    -*) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    *) suites+=("$1") ;;
  esac
  shift
done
[ ${#suites[@]} -gt 0 ] || suites=(nccl::)

# The stand-in for NVIDIA's compiler writes empty kernels, which the simulated driver accepts.
target="${CARGO_TARGET_DIR:-$PWD/target}/nccl-sim"
export PATH="$PWD/scripts/check-only:$PATH" NVCC="$PWD/scripts/check-only/nvcc" CUDA_COMPUTE_CAP=90
export CUDA_HOME="$target/cuda" CARGO_TARGET_DIR="$target/build" NCCL_SIM_NAMES="$target/names"
mkdir -p "$CUDA_HOME/lib"
python3 scripts/cuda_stubs.py --names "$target/names.new"
cmp -s "$target/names.new" "$target/names" || mv "$target/names.new" "$target/names"
cargo build --locked --quiet -p nccl-sim
for library in cuda nccl nvrtc curand cublas cublasLt cudart; do
  ln -sf "$CARGO_TARGET_DIR/debug/libnccl_sim.so" "$CUDA_HOME/lib/lib$library.so"
done
tests() { cargo test --locked --quiet -p candle-dist --features nccl,test-utils/nccl --test suite "$@"; }
tests --no-run

export LD_LIBRARY_PATH="$CUDA_HOME/lib:${LD_LIBRARY_PATH:-}" CANDLE_TEST_BACKEND=nccl
export SIM_REPORT="$target/report"
: >"$SIM_REPORT"
failed=0
for seed in $(seq "$first" $((first + seeds - 1))); do
  for count in $gpus; do
    for suite in "${suites[@]}"; do
      log="$target/log"
      if ! SIM_SEED=$seed SIM_GPUS=$count tests "$suite" -- --test-threads 1 >"$log" 2>&1; then
        failed=$((failed + 1))
        echo "FAILED $suite on $count GPUs with seed $seed:"
        tail -n 40 "$log"
      fi
    done
  done
done
races=$(wc -l <"$SIM_REPORT")
[ "$races" -eq 0 ] || sort "$SIM_REPORT" | uniq | head -n 40
echo "seeds $seeds races $races failed $failed"
[ "$races" -eq 0 ] && [ "$failed" -eq 0 ]
