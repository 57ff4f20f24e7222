#!/usr/bin/env bash
# Fails if a relative link in a Markdown file of the repository leads to a file or folder that does not exist.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0
while IFS=: read -r file line link; do
  target="$(dirname "$file")/${link%%#*}"
  [ -e "$target" ] || { echo "$file:$line: $link does not exist" >&2; failed=1; }
done < <(git ls-files '*.md' | xargs awk '
  FNR == 1 { code = 0 }
  /^ *```/ { code = !code }
  code { next }
  { rest = $0
    while (match(rest, /\]\([^)]+\)/)) {
      link = substr(rest, RSTART + 2, RLENGTH - 3); rest = substr(rest, RSTART + RLENGTH)
      # Links of rustdoc name items, and those with a scheme or only an anchor name no file.
      if (link !~ /^[a-z]+:/ && link !~ /::|^#|\(/ && link ~ /[.\/]/) print FILENAME ":" FNR ":" link
    } }')
exit "$failed"
