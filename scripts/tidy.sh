#!/usr/bin/env bash
# clang-tidy over our own sources, with the compile commands of the dev preset. Arguments: files
# (default: all).
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset dev -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
  mapfile -t files < <(find src tools -name '*.cc' | LC_ALL=C sort)
fi
# g++ flags that clang does not know are no findings.
printf '%s\0' "${files[@]}" | xargs -0 -n 1 -P "$(scripts/jobs.sh)" \
  clang-tidy -p build/dev --quiet --extra-arg=-Wno-unknown-warning-option
