#!/usr/bin/env bash
# Runs all that can be learned from one machine with an NVIDIA GPU in at most nine minutes. Builds nothing.
#
# usage: gpu-device.sh [--only STEP,..] [--budget SECONDS] [--simulated] [FOLDER]
#
# FOLDER was made by gpu-build.sh: by default this script's own, or target/gpu. Each step has a limit of its own, and all together
# SECONDS (default 520); a step that hangs costs its limit and no more. The table at the end has a line for each step: PASSED, FAILED, or
# SKIPPED with the reason. The status is 0 unless a step failed. $OUT (default target/gpu-out) then has the log and numbers, from which
# scripts/gpu_table.py writes the table of GPU.md. --simulated is for a FOLDER of scripts/gpu-dry-run.sh.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ -e "$here/programs.tar.xz" ]; then folder="$here"; else folder="$here/../target/gpu"; fi
usage() { sed -n '4,9s/^# \{0,1\}//p' "$0" >&2; echo "error: $1" >&2; exit 2; }
only="" budget=520 simulated=""
while [ $# -gt 0 ]; do
  case "$1" in
    --only | --budget) [ $# -gt 1 ] || usage "$1 lacks its value" ;;&
    --only) only="$2"; shift ;;
    --budget) [[ "$2" =~ ^[0-9]{1,5}$ ]] || usage "--budget takes seconds, not '$2'"; budget="$2"; shift ;;
    --simulated) simulated=1 ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) usage "unknown flag $1" ;;
    *) folder="$1" ;;
  esac
  shift
done
STEPS="probe driver queues threads-2 gradients threads-4 nccl-1 processes nccl-2 toy fsdp pipeline hang kill speed decode peer sanitizer nccl-4 defaults"
for name in ${only//,/ }; do [[ " $STEPS " == *" $name "* ]] || usage "no step $name; steps: $STEPS"; done

OUT="${OUT:-target/gpu-out}"
mkdir -p "$OUT"
exec > >(tee "$OUT/log") 2>&1
began=$SECONDS failed=0
table=()
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
row() { table+=("$(printf '%-8s %-10s %5s s  %s' "$@")"); }
# step NAME SECONDS COMMAND..: runs it within its limit and what is left of the budget.
step() {
  local name="$1" limit="$2" left=$((budget - SECONDS + began)) from=$SECONDS status=0
  shift 2
  # Kernels are host code there.
  [ -z "$simulated" ] || limit=$((limit * 4))
  [[ -z "$only" || ",$only," == *",$name,"* ]] || return 0
  [ "$left" -gt 10 ] || { row SKIPPED "$name" 0 "nothing is left of the budget"; return 0; }
  [ "$limit" -lt "$left" ] || limit=$left
  echo "=== $name"
  timeout --kill-after=5 "$limit" "$@" || status=$?
  case "$status" in
    0) row PASSED "$name" $((SECONDS - from)) "" ;;
    75) row SKIPPED "$name" $((SECONDS - from)) "$(tail -n 1 "$work/skipped" 2>/dev/null)" ;;
    124 | 137) failed=1; row FAILED "$name" $((SECONDS - from)) "no end within $limit s" ;;
    *) failed=1; row FAILED "$name" $((SECONDS - from)) "status $status" ;;
  esac
}
finish() {
  echo "--- $((SECONDS - began)) s"
  printf '%s\n' "${table[@]}"
  exit "$failed"
}
die() { echo "FAILED all: $*"; exit 1; }

# The programs, and CUDA's libraries: from NVIDIA's Python wheels if installed, otherwise the system's.
small=()
if [ -n "$simulated" ]; then
  ln -s "$(cd "$folder" && pwd)"/programs/* "$work/"
  small=(--small)
else
  nvidia-smi -L || die "no NVIDIA GPU here"
  [ -e "$folder/programs.tar.xz" ] || die "no programs in $folder; run scripts/gpu-build.sh first"
  python3 - "$folder" "$work" <<'P' || die "the programs cannot be unpacked"
import lzma, pathlib, sys, tarfile
folder, work = map(pathlib.Path, sys.argv[1:])
with lzma.open(folder / "programs.tar.xz") as packed, tarfile.open(fileobj=packed) as archive:
    archive.extractall(work, filter="data")
(work / "libnccl.so.2").write_bytes(lzma.open(folder / "libnccl.so.2.xz").read())
P
  wheels="$(python3 - <<'P'
import glob, site, sysconfig
roots = {sysconfig.get_paths()["purelib"], *site.getsitepackages()}
print(":".join(path for root in roots for path in glob.glob(root + "/nvidia/*/lib") if "/nccl/" not in path))
P
)"
  export LD_LIBRARY_PATH="$work:${wheels:+$wheels:}${CUDA_HOME:-/usr/local/cuda}/lib64:${LD_LIBRARY_PATH:-}"
fi
for program in "$work"/*; do
  missing="$(ldd "$program" 2>/dev/null | grep 'not found' || true)"
  # shellcheck disable=SC2086 # printed on one line
  [ -z "$missing" ] || die "libraries of CUDA 13 are missing for $(basename "$program"):" $missing
done

# There is one card: features that need two cards or a network are off. Kernels that candle's driver compiles are kept for the next step.
export CUDA_CACHE_PATH="$work/cache" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_NET_GDR_LEVEL=LOC
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}" CUDA_MODULE_LOADING=EAGER CANDLE_DIST_SHARE_GPUS=1
[ -n "$simulated" ] || export NCCL_DEBUG=WARN
check=("$work/gpu-check" ${small[@]+"${small[@]}"})

# skip REASON: ends a step that cannot run here.
skip() { echo "$*" | tee "$work/skipped"; exit 75; }
# pair COMMAND..: two processes that share the card, started as by a launcher. The status is that of the first one that failed.
pair() {
  [ -z "$SIMULATED" ] || SIM_DIR="$(mktemp -d "$work/exchange.XXXXXX")" && export SIM_DIR
  export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
  local first=0 second=0
  RANK=1 LOCAL_RANK=1 "$@" >"$work/second" 2>&1 &
  RANK=0 LOCAL_RANK=0 "$@" || first=$?
  wait $! || second=$?
  sed 's/^/rank 1: /' "$work/second"
  return $((first ? first : second))
}
toy() {
  local few=(--steps 20)
  [ -z "$SIMULATED" ] || few=(--steps 3 --dim 32 --layers 2 --seq 16 --batch 4)
  pair "$work/toy-transformer" --backend nccl "${few[@]}" "$@"
}
export -f skip pair toy; export work

probe() {
  [ -z "$SIMULATED" ] || skip "a simulated GPU"
  nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv
  ldconfig -p | grep -E 'libcuda\.so|ptxjit|nvidia-ml' || true
  find / -xdev -name 'libnvidia-ptxjitcompiler*' 2>/dev/null | head -n 2
  ldd "$work/gpu-check" | grep -E 'nccl|cublas|nvrtc|cuda'
  uname -r
  df -h /dev/shm | tail -n 1
}
# Starts of kernels behind streams that wait, with few and many queues of the GPU.
queues() {
  [ -z "$SIMULATED" ] || skip "a simulated GPU runs a kernel whole"
  for count in 1 8 32; do
    echo "CUDA_DEVICE_MAX_CONNECTIONS=$count"
    CUDA_DEVICE_MAX_CONNECTIONS=$count "$work/gpu-check" --only driver --ranks 1 | grep 'NUMBER.*starts' || return 1
  done
}
# All ops, values and gradients, on the GPU against the host.
gradients() {
  export CANDLE_TEST_BACKEND=threads CANDLE_TEST_DEVICE=cuda
  local status=0
  cd "$work" || return 1
  if [ -n "$SIMULATED" ]; then
    "$work/nn" --test-threads 1 text_attention:: kv_cache::
    return
  fi
  for suite in suite nn tables; do
    [ -x "$work/$suite" ] || { echo "no program $suite"; return 1; }
  done
  "$work/suite" --test-threads 8 kernels:: ops:: random_device:: rows_device:: || status=1
  "$work/nn" --test-threads 8 layers:: text_attention:: kv_cache:: optimizer:: fsdp:: || status=1
  "$work/tables" --test-threads 8 embedding:: sparse:: || status=1
  return $status
}
# A process is killed while the other one waits for it: that one must end by itself, with its cause.
killed() {
  [ -z "$SIMULATED" ] || SIM_DIR="$(mktemp -d "$work/exchange.XXXXXX")" && export SIM_DIR
  export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
  local first status=0
  RANK=1 LOCAL_RANK=1 "$work/toy-transformer" --backend nccl --steps 100000 --runs tp >/dev/null 2>&1 &
  local second=$!
  RANK=0 LOCAL_RANK=0 "$work/toy-transformer" --backend nccl --steps 100000 --runs tp &
  first=$!
  sleep "${KILL_AFTER:-12}"
  kill -9 $second || { echo "the second process had ended"; kill -9 $first; return 1; }
  wait $first || status=$?
  echo "the first process ended with status $status"
  [ "$status" -ne 0 ] && [ "$status" -lt 128 ]
}
# Decoding of a model of a billion random weights, which is written here.
decode() {
  export WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000))
  [ -z "$SIMULATED" ] || { "$work/lm" generate --backend nccl --max-tokens 4 --json - | grep tokens_per_s; return; }
  python3 "$PEER" --write "$work/model" || skip "no transformers to write a model"
  "$work/lm" generate --backend nccl --model "$work/model" --prompt "Once upon a time" --max-tokens 128 --json - >"$work/told" || return 1
  python3 -c 'import json, sys; told = json.load(open(sys.argv[1])); print("NUMBER decoding of a billion weights, one text: %.1f tokens/s" % told["tokens_per_s"])' \
    "$work/told"
}
peer() {
  [ -z "$SIMULATED" ] || skip "a simulated GPU"
  [ -d "$work/model" ] || python3 "$PEER" --write "$work/model" || skip "no transformers"
  python3 "$PEER" --measure "$work/model"
}
sanitizer() {
  command -v compute-sanitizer >/dev/null || skip "no compute-sanitizer here"
  compute-sanitizer --tool memcheck --track-stream-ordered-races all --error-exitcode 9 \
    "$work/gpu-check" --engine threads --ranks 2 --only collectives --seconds 60
}
export SIMULATED="$simulated" PEER="$folder/gpu.py"
export -f probe queues gradients killed decode peer sanitizer

step probe 15 bash -c probe
step driver 25 "${check[@]}" --ranks 1 --only driver
step queues 25 bash -c queues
step threads-2 80 "${check[@]}" --engine threads --ranks 2
step gradients 110 bash -c gradients
step nccl-1 25 "${check[@]}" --engine nccl --ranks 1
step processes 80 bash -c "pair ${check[*]} --engine nccl-process"
step nccl-2 45 "${check[@]}" --engine nccl --ranks 2
step toy 40 bash -c "toy --tp 2"
step fsdp 40 bash -c "toy --fsdp 2 --runs single,pp"
step pipeline 40 bash -c "toy --pp 2 --runs single,pp"
step hang 30 bash -c "pair ${check[*]} --engine nccl-process --only fault --seconds 5"
step kill 45 bash -c killed
step speed 60 "${check[@]}" --ranks 1 --only speed
step decode 45 bash -c decode
step peer 60 bash -c peer
step threads-4 40 "${check[@]}" --engine threads --ranks 4
step nccl-4 45 "${check[@]}" --engine nccl --ranks 4
step sanitizer 60 bash -c sanitizer
step defaults 30 env -u CUDA_MODULE_LOADING -u CUDA_DEVICE_MAX_CONNECTIONS "${check[@]}" --engine nccl --ranks 2
finish
