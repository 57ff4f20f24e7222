#!/usr/bin/env bash
# Fails if a Markdown file of the repository links to a file or folder that does not exist, or names such a source file.
#
# - A relative link, such as [text](docs/faq.md#anchor), must lead to a file or a folder.
# - A name in backticks that ends in .rs, .py or .sh, such as `group/pending.rs`, must be the end of a file's path.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0
paths="$(git ls-files | sed 's|^|/|')"
while IFS=: read -r file line kind name; do
  case "$kind" in
    link) [ -e "$(dirname "$file")/${name%%#*}" ] && continue ;;
    name) grep -qF -- "/$name" <<<"$paths" && grep -qE -- "/${name//./\\.}\$" <<<"$paths" && continue ;;
  esac
  echo "$file:$line: $name does not exist" >&2
  failed=1
done < <(git ls-files '*.md' | xargs awk '
  FNR == 1 { code = 0 }
  /^ *```/ { code = !code }
  code { next }
  # Links of rustdoc name items; links with a scheme or only an anchor name no file.
  { rest = $0
    while (match(rest, /\]\([^)]+\)/)) {
      link = substr(rest, RSTART + 2, RLENGTH - 3); rest = substr(rest, RSTART + RLENGTH)
      if (link !~ /^[a-z]+:/ && link !~ /::|^#|\(/ && link ~ /[.\/]/) print FILENAME ":" FNR ":link:" link
    }
    rest = $0
    while (match(rest, /`[A-Za-z0-9_\/.-]+\.(rs|py|sh)`/)) {
      print FILENAME ":" FNR ":name:" substr(rest, RSTART + 1, RLENGTH - 2); rest = substr(rest, RSTART + RLENGTH)
    } }')
exit "$failed"
