#!/usr/bin/env bash
# Formats all C++ files in place; with --check only tells which are not formatted. Python files: scripts/python-tests
# looks at them with ruff (python/tests/test_style.py).
set -euo pipefail
cd "$(dirname "$0")/.."
formatter=$(command -v clang-format-14 || command -v clang-format) || {
  echo "clang-format is not installed: run scripts/install-deps.sh all" >&2
  exit 1
}
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run --Werror)
folders=()
for folder in include src tools tests fuzz bench examples python; do
  [ -d "$folder" ] && folders+=("$folder")
done
find "${folders[@]}" -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu' | LC_ALL=C sort |
  xargs -r "$formatter" "${mode[@]}"
