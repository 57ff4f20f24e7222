#!/bin/sh
# Draws the imports between the rooms of each crate: docs/imports.md and docs/imports/*.svg.
set -e
cd "$(dirname "$0")/.."
WRITE_IMPORTS=1 cargo test -q -p test-utils --test suite -- --test-threads 1 floors::picture
echo "docs/imports.md"
