#!/usr/bin/env bash
# Checks an edit: formatting, the lints and tests of what it touches, and 300 random programs.
#
#   scripts/quick.sh [--since COMMIT] [--programs N] [FILE..]
#
# Without FILEs it takes those that differ from COMMIT (HEAD), and new ones. It runs the tests whose module is named as the file is:
# candle-shard/src/ops/matmul.rs has `ops::matmul`. If there is none, it looks for the folder, and for the room in the table below.
# Only the binaries that have these tests are built, and lints are those of the library, unit tests and test binaries that have changed.
# Crates and other tests that depend on them are left to `.ci/run`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/test-binary.sh
since=HEAD programs=300 files=()
while (($#)); do
  case "$1" in
    --since) since="${2:?--since needs a commit}" && shift 2 ;;
    --programs) programs="${2:?--programs needs a number}" && shift 2 ;;
    -*) echo "usage: scripts/quick.sh [--since COMMIT] [--programs N] [FILE..]" >&2 && exit 2 ;;
    *) files+=("$1") && shift ;;
  esac
done
[[ "$programs" =~ ^[0-9]+$ ]] || { echo "$programs is no number" >&2 && exit 2; }
if ((${#files[@]} == 0)); then
  changed="$(git diff --name-only --diff-filter=d "$since")"
  mapfile -t files < <({ echo "$changed"; git ls-files --others --exclude-standard; } | sed '/^$/d' | sort -u)
fi

# The crate whose suite tests a crate, if it is another one, and the subjects of rooms that are named otherwise.
declare -A suite_of=([candle-dist-kernels]=candle-shard [candle-lm]=lm [candle-prove]=test-utils)
declare -A rooms=(
  [candle-dist/backend]="conformance" [candle-dist/call]="conformance" [candle-dist/group]="conformance collectives" [candle-dist/link]="control"
  [candle-dist/mesh]="device_mesh" [candle-dist/train]="sync" [candle-dist/world]="failure" [candle-dist-kernels]="kernels"
  [candle-lm]="lm::batch lm::front" [candle-pipe/local_pipe]="graph::parity" [candle-pipe/pipe]="graph" [candle-pipe/tape]="graph::tapes"
  [candle-prove]="prove" [candle-shard/autograd]="gradient_rule" [candle-shard/files]="weights checkpoint"
  [candle-shard/layout]="spec" [candle-shard/nn]="layers" [candle-shard/parallel]="parallelize" [candle-shard/tensor]="gradient_rule"
)

# The subjects of a file: its longest part that names a module of the suite, in the singular or the plural.
subjects() {
  local crate="$1" parts=() first count path
  local suite="${suite_of[$crate]:-$crate}/tests/suite"
  path="${2%.rs}"
  IFS=/ read -ra parts <<<"${path%/mod}"
  for ((first = 0; first < ${#parts[@]}; first++)); do
    for ((count = ${#parts[@]} - first; count > 0; count--)); do
      path="$(IFS=/ && echo "${parts[*]:first:count}")"
      for path in "$path" "${path}s" "${path}es"; do
        if [ -e "$suite/$path.rs" ] || [ -e "$suite/$path/mod.rs" ]; then echo "${path//\//::}" && return; fi
      done
    done
  done
  echo "${rooms[$crate/${parts[0]}]:-${rooms[$crate]:-}}"
}

crates=()
declare -A units=() suites=() binaries=() lints=()
# Lints a target of a crate that has changed.
lint() { [[ " ${lints[$1]:-} " == *" $2 "* ]] || lints[$1]+=" $2"; }
for file in "${files[@]}"; do
  crate="${file%%/*}" path="${file#*/}"
  [ -f "$crate/Cargo.toml" ] && [[ "$file" != *.md ]] || continue
  [[ " ${crates[*]} " == *" $crate "* ]] || crates+=("$crate")
  case "$path" in
    src/*.rs)
      path="${path#src/}"
      lint "$crate" "--lib --bins"
      found="$(subjects "$crate" "$path")" path="${path%.rs}" path="${path%/mod}"
      if grep -qsE '^#\[(cfg\(test\)|test\])' "$file"; then units[$crate]+=" ${path//\//::}"; fi
      if [ -n "$found" ]; then
        suites[${suite_of[$crate]:-$crate}]+=" $found"
      else
        echo "no test is named as $file: \`cargo test -p $crate\` runs all"
      fi
      ;;
    tests/suite/*.rs)
      path="${path#tests/suite/}" path="${path%.rs}" path="${path%/mod}"
      # The root of a binary has the subjects of others.
      if grep -qs '^test_utils::settle_threads' "$file"; then lint "$crate" "--test ${path/#main/suite}" && continue; fi
      lint "$crate" "--test $(binary_of "$crate" "${path//\//::}")"
      suites[$crate]+=" ${path//\//::}"
      ;;
    tests/*.rs)
      path="${path#tests/}" path="${path%%/*}"
      lint "$crate" "--test ${path%.rs}"
      binaries[$crate]+=" ${path%.rs}"
      ;;
    *) lint "$crate" --all-targets ;;
  esac
done
if ((${#crates[@]} == 0)); then
  echo "no crate has changed since $since"
  exit 0
fi
case " ${crates[*]} " in
  *" candle-dist "* | *" candle-dist-kernels "* | *" candle-shard "*) suites[candle-shard]+=" " ;;
esac

steps=""
# Runs a command, and keeps its time for the table at the end.
step() {
  local title="$1" start="$EPOCHREALTIME" status=0
  shift
  "$@" || status=$?
  steps+="$(awk -v a="$start" -v b="$EPOCHREALTIME" -v what="$title" 'BEGIN { printf "%6.1f s  %s", b - a, what }')"$'\n'
  if [ "$status" -ne 0 ]; then
    printf '\n%sfailed: %s\n' "$steps" "$title" >&2
    exit "$status"
  fi
}
began="$EPOCHREALTIME"
words() { tr ' ' '\n' <<<"$*" | sed '/^$/d' | sort -u | tr '\n' ' '; }
said="$(mktemp)"
trap 'rm -f "$said"' EXIT
# Runs tests of a crate, and prints what they have counted, or all that they said if one fails. A filter without tests is an error.
tests() {
  cargo test --quiet -p "$1" "${@:2}" >"$said" 2>&1 || { cat "$said" && return 1; }
  [[ "$*" == *--no-run* ]] || grep -qE '^running [1-9]' "$said" || { echo "no test has such a name: ${*:2}" >&2; return 1; }
  grep -E '^(test result|[0-9]+ programs|SKIPPED)' "$said" || true
}

step "format" cargo fmt --check "${crates[@]/#/--package=}"
for crate in "${crates[@]}"; do
  # shellcheck disable=SC2086 # several words
  step "lints of $crate:${lints[$crate]}" cargo clippy --quiet -p "$crate" ${lints[$crate]} -- -D warnings
  [ -z "${units[$crate]:-}" ] ||
    step "lints of unit tests of $crate" cargo clippy --quiet -p "$crate" --lib --profile test -- -D warnings
done
for crate in "${!units[@]}"; do
  names="$(words "${units[$crate]}")"
  # shellcheck disable=SC2086 # several words
  step "unit tests of $crate: $names" tests "$crate" --lib -- --test-threads 1 $names
done
for crate in "${!suites[@]}"; do
  declare -A names=()
  for name in $(words "${suites[$crate]}"); do names[$(binary_of "$crate" "$name")]+="$name "; done
  # Random programs are there.
  [ "$crate" != candle-shard ] || names[suite]+=""
  for binary in "${!names[@]}"; do
    step "build of the tests of $crate: $binary" tests "$crate" --test "$binary" --no-run
    # shellcheck disable=SC2086 # several words
    [ -z "${names[$binary]}" ] ||
      step "$binary of $crate: ${names[$binary]}" tests "$crate" --test "$binary" -- --test-threads 1 ${names[$binary]}
  done
  unset names
done
for crate in "${!binaries[@]}"; do
  for binary in $(words "${binaries[$crate]}"); do
    step "tests of $crate: $binary" tests "$crate" --test "$binary" -- --test-threads 1
  done
done
if [ -n "${suites[candle-shard]:-}" ]; then
  export CANDLE_SHARD_PROGRAMS="$programs"
  step "$programs random programs" tests candle-shard --test suite -- --test-threads 1 programs::
fi
printf '\n%s' "$steps"
awk -v a="$began" -v b="$EPOCHREALTIME" 'BEGIN { printf "%6.1f s  all\n", b - a }'
