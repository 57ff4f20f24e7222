#!/usr/bin/env bash
# Builds gpu-check without an NVIDIA GPU, for a machine with one. Needs cargo, cc, strip, xz, and python3 with pip.
#
# usage: scripts/gpu-build.sh [FOLDER]
#
# FOLDER (default target/gpu-check) then holds less than 64 MiB: the program, an NCCL that allows several ranks per GPU,
# and gpu-check.sh to run there. CUDA_COMPUTE_CAP (default 90) is the GPU's generation. NVIDIA's compiler and libraries
# come from its Python wheels and are kept in the user's cache.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-target/gpu-check}"
export CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-90}"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/candle-distributed/cuda-13.0.2"
nccl=2.30.7
# All from one release of CUDA: the driver of CUDA 13.0 cannot read the output of a newer compiler.
wheels="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-curand==10.4.0.35"

unpacked() { # FOLDER WHEEL..: unpacks the wheels into FOLDER
  local into="$1" download="$1.part"
  shift
  rm -rf "$download" "$into"
  python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" "$@"
  for wheel in "$download"/*.whl; do python3 -m zipfile -e "$wheel" "$download"; done
  rm "$download"/*.whl
  mv "$download" "$into"
}

mkdir -p "$cache"
# shellcheck disable=SC2086 # a list
[ -d "$cache/toolkit" ] || unpacked "$cache/toolkit" $wheels
[ -d "$cache/nccl-$nccl" ] || unpacked "$cache/nccl-$nccl" "nvidia-nccl-cu13==$nccl"
export CUDA_HOME="$cache/toolkit/nvidia/cu13"
chmod +x "$CUDA_HOME"/bin/* "$CUDA_HOME"/nvvm/bin/*
ln -sf libcudart.so.13 "$CUDA_HOME/lib/libcudart.so"
ln -sf libcurand.so.10 "$CUDA_HOME/lib/libcurand.so"
cargo fetch --locked --quiet
python3 scripts/cuda_stubs.py "$CUDA_HOME/lib/stubs"

target="${CARGO_TARGET_DIR:-target}/gpu"
NVCC="$CUDA_HOME/bin/nvcc" PATH="$CUDA_HOME/bin:$PATH" CUDAFORGE_THREADS="${CUDAFORGE_THREADS:-$(nproc)}" \
  CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=0 \
  cargo build --release --locked -p examples --bin gpu-check --features nccl --target-dir "$target"

mkdir -p "$folder"
strip -o "$folder/gpu-check" "$target/release/gpu-check"
strip --strip-unneeded -o "$folder/whole" "$cache/nccl-$nccl/nvidia/nccl/lib/libnccl.so.2"
python3 scripts/nccl_slim.py "$folder/whole" "$folder/libnccl.so.2" "$CUDA_COMPUTE_CAP"
rm "$folder/whole"
xz --force --threads=0 "$folder/gpu-check" "$folder/libnccl.so.2"
cp scripts/gpu-check.sh "$folder"
du -sh "$folder"
