#!/usr/bin/env bash
# Builds a release and runs the bundled trained checkpoints, in one screen.
set -euo pipefail
cd "$(dirname "$0")/.."

log=build/demo-build.log
mkdir -p build
echo "building a release (first time: a few minutes; log in $log)"
if ! { cmake --preset release && cmake --build build/release -j "$(scripts/jobs.sh)"; } >"$log" 2>&1; then
  tail -n 40 "$log" >&2
  echo "the build failed; the whole log is in $log" >&2
  exit 1
fi
echo
exec build/release/bin/moesaic demo testdata/models/mini-deepseek-v3 testdata/models/mini-qwen3-moe \
  testdata/models/mini-gpt-oss
