# binary_of CRATE FILTER: the name of the test binary that has the subject which FILTER begins with. Most crates have one, `suite`;
# others have roots beside `main.rs`. Sourced by other scripts.
binary_of() {
  local root subject="${2%%::*}"
  for root in $(sed -n 's,^path = "tests/suite/\(.*\)\.rs"$,\1,p' "$1/Cargo.toml"); do
    if grep -qx "mod $subject;" "$1/tests/suite/$root.rs"; then echo "$root" && return; fi
  done
  echo suite
}
