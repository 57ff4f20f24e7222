#!/usr/bin/env bash
# Runs gpu-device.sh on a simulated GPU, to know that the script and its programs work before a machine with a card is there.
#
# usage: scripts/gpu-dry-run.sh [--only STEP,..]
#
# Builds most of what gpu-build.sh builds, in the dev profile and for the simulated driver (nccl-sim), and measures less: of the tests of all ops
# those of attention and caches. Steps that need a real card or PyTorch are skipped. The status is that of gpu-device.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/sim-build.sh
. scripts/test-binary.sh

# built NAME ARGUMENT..: calls cargo, and links the program of this name into the folder.
built() {
  local path
  path="$(executable "$@" --quiet)"
  ln -sf "$path" "$folder/dry/programs/$1"
}
rm -rf "$folder/dry"
mkdir -p "$folder/dry/programs"
for name in gpu-check toy-transformer; do built "$name" build -p examples -p workspace-hack --bin "$name" --features examples/nccl; done
# What no step needs is not built.
needs() { [[ $# -lt 2 || ",$2," == *",$1,"* ]]; }
steps=()
[ "${1:-}" != --only ] || steps=("${2:-}")
! needs decode ${steps[@]+"${steps[@]}"} || built lm build -p lm -p workspace-hack --bin lm --features lm/nccl
! needs gradients ${steps[@]+"${steps[@]}"} ||
  built nn test -p candle-shard --test nn --no-run --features candle-shard/nccl,test-utils/nccl
# One card; processes exchange data through a folder.
export SIM_GPUS=1 SIM_REPORT="$folder/dry/report" OUT="${OUT:-$folder/dry/out}" KILL_AFTER=8
: >"$SIM_REPORT"
status=0
scripts/gpu-device.sh --simulated --budget 1500 "$@" "$folder/dry" || status=$?
if [ -s "$SIM_REPORT" ]; then
  echo "the simulator found faults:"
  cat "$SIM_REPORT"
  status=1
fi
python3 scripts/gpu_table.py "$OUT/log" --print >"$folder/dry/table"
grep -q '^| driver | PASSED' "$folder/dry/table" || [ $# -gt 0 ] || { echo "the table lacks its steps"; status=1; }
exit "$status"
