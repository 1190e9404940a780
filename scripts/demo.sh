#!/usr/bin/env bash
# Builds a release and runs the bundled trained checkpoints, in one screen.
set -euo pipefail
cd "$(dirname "$0")/.."

log=build/demo-build.log
mkdir -p build
# Without an NVIDIA device a first build leaves the kernels out, which take most of its time; `make release` has them.
cuda=()
if [ ! -e build/release/CMakeCache.txt ] && ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
  cuda=(-DMOESAIC_CUDA=OFF)
fi
echo "building a release (first time: a few minutes; log in $log)"
if ! { cmake --preset release "${cuda[@]}" && cmake --build build/release -j "$(scripts/jobs.sh)"; } >"$log" 2>&1; then
  tail -n 40 "$log" >&2
  echo "the build failed; the whole log is in $log" >&2
  exit 1
fi
echo
exec build/release/bin/moesaic demo testdata/models/mini-deepseek-v3 testdata/models/mini-qwen3-moe \
  testdata/models/mini-gpt-oss
