#!/usr/bin/env bash
# Runs the GPU tests of the experts stage on small shapes under compute-sanitizer's four tools.
# usage: scripts/gpu-sanitize.sh [TEST_BINARY] (default: the dev build's cuda_experts_test)
set -uo pipefail
cd "$(dirname "$0")/.."
binary=${1:-build/dev/tests/experts/cuda_experts_test}
command -v compute-sanitizer >/dev/null || {
  echo "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit" >&2
  exit 1
}
# Small cases of both formats; graph replay takes racecheck too long.
filter='CudaExpertsExact.Several*:CudaExperts.Shared*:CudaExpertsBound.Router*'
failed=0
for tool in memcheck racecheck initcheck synccheck; do
  log=$(mktemp)
  if timeout "${SANITIZE_SECONDS:-120}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    "$binary" --gtest_filter="$filter" >"$log" 2>&1; then
    echo "$tool: clean"
  else
    echo "$tool: FAILED ($?)"
    grep -E "=========|FAILED" "$log" | head -${SANITIZE_LINES:-12}
    failed=1
  fi
  rm -f "$log"
done
exit $failed
