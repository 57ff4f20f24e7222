#!/usr/bin/env bash
# Builds the programs of gpu-device.sh without an NVIDIA GPU, for a machine with one. Needs cargo, cc, strip, xz, and python3 with pip.
#
# usage: scripts/gpu-build.sh [--only PROGRAM,..] [FOLDER]
#
# FOLDER (default target/gpu) then holds less than 50 MiB: the programs in one archive, an NCCL that allows several ranks per GPU, and the
# scripts to run there. PROGRAMs are gpu-check, toy-transformer, lm, and suite, nn and tables of candle-shard's tests (default: all).
# CUDA_COMPUTE_CAP (default 90) is the GPU's generation. NVIDIA's compiler and libraries come from its Python wheels and are kept in the
# user's cache.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/test-binary.sh
only=gpu-check,toy-transformer,lm,suite,nn,tables folder=target/gpu
usage() { sed -n '4,9s/^# \{0,1\}//p' scripts/gpu-build.sh >&2; echo "error: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    --only) [ $# -gt 1 ] || usage "--only lacks its value"; only="$2"; shift ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' scripts/gpu-build.sh; exit 0 ;;
    -*) usage "unknown flag $1" ;;
    *) folder="$1" ;;
  esac
  shift
done
for name in ${only//,/ }; do
  [[ " gpu-check toy-transformer lm suite nn tables " == *" $name "* ]] || usage "no program $name"
done
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

# The default target folder is that of the GPU build: its crates have other features and their kernels are compiled.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/gpu-build" NVCC="$CUDA_HOME/bin/nvcc" PATH="$CUDA_HOME/bin:$PATH"
export CUDAFORGE_THREADS="${CUDAFORGE_THREADS:-$(nproc)}" CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=0
programs="$CARGO_TARGET_DIR/programs"
rm -rf "$programs"
mkdir -p "$programs" "$folder"
# built NAME ARGUMENT..: calls cargo, and puts the program of this name into the folder.
built() {
  local path
  path="$(executable "$@" --release)"
  strip -o "$programs/$1" "$path"
}
for name in ${only//,/ }; do
  case "$name" in
    gpu-check | toy-transformer) built "$name" build -p examples -p workspace-hack --bin "$name" --features examples/nccl ;;
    lm) built lm build -p lm -p workspace-hack --bin lm --features lm/nccl ;;
    *) built "$name" test -p candle-shard --test "$name" --no-run --features candle-shard/nccl,test-utils/nccl ;;
  esac
done
# One archive: the programs share most of their kernels, so a large dictionary packs them as one.
python3 - "$programs" "$folder/programs.tar.xz" <<'P'
import lzma, pathlib, sys, tarfile
filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 256 << 20}]
with lzma.open(sys.argv[2], "wb", filters=filters) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
    for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
        archive.add(path, path.name)
P
if [ ! -e "$folder/libnccl.so.2.xz" ]; then
  strip --strip-unneeded -o "$folder/whole" "$cache/nccl-$nccl/nvidia/nccl/lib/libnccl.so.2"
  python3 scripts/nccl_slim.py "$folder/whole" "$folder/libnccl.so.2" "$CUDA_COMPUTE_CAP"
  rm "$folder/whole"
  xz --force --threads=0 "$folder/libnccl.so.2"
fi
cp scripts/gpu-device.sh benchmarks/peers/gpu.py "$folder"
du -sh "$folder"
