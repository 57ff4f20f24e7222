#!/usr/bin/env bash
# Trains random models in random set-ups and compares them with one device; see docs/prove.md.
#
#   scripts/prove.sh [--set-ups N] [--first SEED]
#
# A model is run in three set-ups, and with more axes in two others. The last line is `prove N wrong N refused N`.
set -euo pipefail
cd "$(dirname "$0")/.."
set_ups=300 first=0
while (($#)); do
  case "$1" in
    --set-ups) set_ups="${2:?--set-ups needs a number}" && shift 2 ;;
    --first) first="${2:?--first needs a seed}" && shift 2 ;;
    *) echo "usage: scripts/prove.sh [--set-ups N] [--first SEED]" >&2 && exit 2 ;;
  esac
done
for number in "$set_ups" "$first"; do
  [[ "$number" =~ ^[0-9]+$ ]] || { echo "$number is no number" >&2 && exit 2; }
done
said="$(mktemp)"
trap 'rm -f "$said"' EXIT
status=0
CANDLE_PROVE_SET_UPS="$set_ups" CANDLE_PROVE_FIRST="$first" \
  cargo test --features mpi --test suite random_set_ups -- --test-threads 1 --nocapture | tee "$said" || status=$?
grep -o 'prove [0-9]* wrong [0-9]* refused [0-9]*$' "$said" | tail -n 1
exit "$status"
