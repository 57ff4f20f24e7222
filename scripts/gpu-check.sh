#!/usr/bin/env bash
# Runs the checks built by gpu-build.sh on a machine with an NVIDIA GPU. Builds nothing.
#
# usage: gpu-check.sh [FOLDER], where FOLDER was made by gpu-build.sh: by default this script's own, or target/gpu-check
#
# Prints a line per check: PASSED, FAILED, or SKIPPED with the reason. The exit status is 0 unless a check failed.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ -e "$here/gpu-check.xz" ]; then folder="${1:-$here}"; else folder="${1:-$here/../target/gpu-check}"; fi

skip() { echo "SKIPPED all: $*"; exit 0; }
[ -e "$folder/gpu-check.xz" ] || skip "no program in $folder; run scripts/gpu-build.sh first"
nvidia-smi -L || skip "no NVIDIA GPU here"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
for name in gpu-check libnccl.so.2; do
  python3 -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
    "$folder/$name.xz" "$work/$name" || exit 1
done
chmod +x "$work/gpu-check"

# CUDA's libraries: from NVIDIA's Python wheels if installed, otherwise the system's.
wheels="$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)"
export LD_LIBRARY_PATH="$work:${wheels:+$wheels/cu13/lib:}${CUDA_HOME:-/usr/local/cuda}/lib64:${LD_LIBRARY_PATH:-}"
missing="$(ldd "$work/gpu-check" | grep 'not found' || true)"
# shellcheck disable=SC2086 # printed on one line
[ -z "$missing" ] || skip "libraries of CUDA 13 are missing:" $missing

# There is only one card, so disable features that need two cards or a network.
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo CUDA_MODULE_LOADING=EAGER
failed=0
check() { timeout --kill-after=10 "${GPU_CHECK_SECONDS:-120}" "$work/gpu-check" "$@"; }
# ended RUN STATUS: records how a run ended.
ended() {
  [ "$2" -ne 124 ] && [ "$2" -ne 137 ] || echo "FAILED $1: no end within ${GPU_CHECK_SECONDS:-120} s"
  [ "$2" -eq 0 ] || failed=1
}
for run in "nccl 1" "local 2" "local 4" "nccl 2" "nccl 4"; do
  read -r engine ranks <<<"$run"
  check --engine "$engine" --ranks "$ranks"
  ended "$engine, $ranks ranks" $?
done

# Two processes that share the card, started as by a launcher.
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 10000)) CANDLE_DIST_SHARE_GPUS=1
RANK=1 check --engine nccl-process &
RANK=0 check --engine nccl-process
ended "nccl-process, rank 0" $?
wait $!
ended "nccl-process, rank 1" $?
exit "$failed"
