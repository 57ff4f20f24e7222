# binary_of CRATE FILTER: the name of the test binary that has the subject which FILTER begins with. Most crates have one, `suite`;
# others have roots beside `main.rs`. Sourced by other scripts.
binary_of() {
  local root subject="${2%%::*}"
  for root in $(sed -n 's,^path = "tests/suite/\(.*\)\.rs"$,\1,p' "$1/Cargo.toml"); do
    if grep -qx "mod $subject;" "$1/tests/suite/$root.rs"; then echo "$root" && return; fi
  done
  echo suite
}

# executable NAME ARGUMENT..: calls cargo, and prints the path of the program or test of this name that it has built.
executable() {
  local name="$1" path
  shift
  path="$(cargo "$@" --locked --message-format json-render-diagnostics |
    grep -o "\"executable\":\"[^\"]*/$name\(-[0-9a-f]*\)\?\"" | tail -n 1 | cut -d'"' -f4)"
  [ -x "$path" ] || { echo "error: $name cannot be built" >&2; return 1; }
  echo "$path"
}
