#!/usr/bin/env bash
# Fails if `cargo test -p CRATE` selects other features of a shared dependency or library than `cargo test`, because cargo would
# then compile it twice. To fix it, add a line to workspace-hack/Cargo.toml, or to test-utils/Cargo.toml for libraries of the workspace.
set -euo pipefail
cd "$(dirname "$0")/.."
# Each dependency and member of the workspace with its version and features, without paths.
selected() {
  cargo tree "$@" -e normal,build,dev -f '{p} [{f}]' --prefix none --no-dedupe | sed 's/ (\*)//; s/(proc-macro) //' | sed 's, (/[^)]*),,' | sort -u
}
all=$(selected --workspace)
status=0
for crate in candle-dist-base candle-dist candle-dist-kernels candle-shard candle-pipe candle-prove candle-lm test-utils examples lm extension; do
  if unlike=$(selected -p "$crate" | grep -Fxv -f <(echo "$all")); then
    printf '%s selects features that the workspace does not select:\n%s\n' "$crate" "$unlike"
    status=1
  fi
done
exit $status
