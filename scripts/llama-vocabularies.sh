#!/usr/bin/env bash
# Prints the folder of the vocabularies of llama.cpp, with texts and the tokens that it makes of them. The source package of the Python
# package llama-cpp-python (77 MB, MIT) ships them. It is downloaded once, with pip, to a cache outside of the repository. Prints nothing
# where that cannot be done.
set -euo pipefail
version=0.3.36
sum=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
cache="${XDG_CACHE_HOME:-$HOME/.cache}/candle-dist/llama-vocabularies-$version"
if [ ! -d "$cache" ]; then
  # The folder is whole, or not there.
  partial="$cache.$$"
  trap 'rm -rf "$partial"' EXIT
  mkdir -p "$partial/package"
  # pip compares the digest before it runs anything of the package.
  echo "llama-cpp-python==$version --hash=sha256:$sum" >"$partial/wanted"
  if ! pip download --quiet --no-deps --no-binary llama-cpp-python --require-hashes --dest "$partial" -r "$partial/wanted" >"$partial/said" 2>&1; then
    echo "note: the vocabularies cannot be downloaded: $(grep -v '^$' "$partial/said" | tail -n 1)" >&2
    exit 0
  fi
  tar xzf "$partial/llama_cpp_python-$version.tar.gz" --directory "$partial/package" --strip-components=4 --wildcards '*/vendor/llama.cpp/models/ggml-vocab-*'
  mv "$partial/package" "$cache"
fi
echo "$cache"
