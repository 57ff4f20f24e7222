# Builds the simulated driver, and sets what programs need to be built for it and to run on it. Sourced by other scripts at the root.
# The stand-in for NVIDIA's compiler writes empty kernels, which the simulated driver accepts. The folder of the build is
# that of all tests: most dependencies are the same.
mkdir -p "${CARGO_TARGET_DIR:-target}"
CARGO_TARGET_DIR="$(cd "${CARGO_TARGET_DIR:-target}" && pwd)"
folder="$CARGO_TARGET_DIR/nccl-sim"
export CARGO_TARGET_DIR CUDA_HOME="$folder/cuda" NCCL_SIM_NAMES="$folder/names"
export PATH="$PWD/scripts/check-only:$PATH" NVCC="$PWD/scripts/check-only/nvcc" CUDA_COMPUTE_CAP=90
mkdir -p "$CUDA_HOME/lib"

# source CRATE: the folder of a dependency.
metadata="$(cargo metadata --format-version 1 --locked --all-features)"
source_of() { grep -o "\"manifest_path\":\"[^\"]*/$1-[0-9][^\"/]*/Cargo.toml\"" <<<"$metadata" | head -n 1 | cut -d'"' -f4 | xargs dirname; }
# The functions that the build links: all that cudarc binds, and the launchers of candle's static kernels.
bindings="$(source_of cudarc)/src"
for file in "$bindings"/{driver,nccl,nvrtc,cublas,cublaslt,curand}/sys/mod.rs "$(source_of candle-kernels)/src/ffi.rs"; do
  awk '/extern "C" \{$/ { on = 1 } /^ *\}$/ { on = 0 }
    on && match($0, /fn [A-Za-z0-9_]+\(/) { print substr($0, RSTART + 3, RLENGTH - 4) }' "$file"
done | sort -u >"$folder/names.new"
[ -s "$folder/names.new" ] || { echo "error: no functions found in $bindings" >&2; exit 1; }
cmp -s "$folder/names.new" "$folder/names" || mv "$folder/names.new" "$folder/names"
# With the features that the tests have, so that nothing is built twice.
cargo build --locked --quiet -p nccl-sim -p workspace-hack
for library in cuda nccl nvrtc curand cublas cublasLt cudart; do
  ln -sf "$CARGO_TARGET_DIR/debug/libnccl_sim.so" "$CUDA_HOME/lib/lib$library.so"
done
export LD_LIBRARY_PATH="$CUDA_HOME/lib:${LD_LIBRARY_PATH:-}"
