#!/usr/bin/env bash
# clang-tidy over our own sources, every .cc and .cu of src and tools.
#   scripts/tidy.sh            all checks but the path-sensitive analyzer, folder by folder as the release
#                              preset compiles: most of the time goes to headers, which are then read once
#   scripts/tidy.sh --deep     with the analyzer, which sees only the file it is given: one by one
#   scripts/tidy.sh [--deep] FILES
# Device code is read by clang too, with the declarations of scripts/tidy/ in place of nvcc's header; files that need the
# CUDA runtime are left out, and named, where there is no toolkit.
set -euo pipefail
cd "$(dirname "$0")/.."
deep=0
if [ "${1:-}" = --deep ]; then
  deep=1
  shift
fi
files=("$@")
unity=ON
[ $deep = 0 ] && [ ${#files[@]} -eq 0 ] || unity=OFF
mkdir -p build
build=build/tidy-$([ $unity = ON ] && echo folders || echo files)
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_UNITY_BUILD=$unity -DMOESAIC_BUILD_TESTS=OFF \
  -DMOESAIC_FAULT_INJECTION=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >"$build.log" 2>&1 || {
  tail -20 "$build.log" >&2
  exit 1
}

cmake --build "$build" --target moesaic_tool_version >>"$build.log"

# What the compile commands name: units of folders or files, host and device code apart. Generated units of one
# format differ in what they instantiate: one of each.
mapfile -t known < <(sed -n 's/^ *"file": "\(.*\)",\?$/\1/p' "$build/compile_commands.json" | sed "s|^$PWD/||" |
  grep -vE '^(bench|examples)/|/grouped_gemm_.*_(any|relu2|[a-z0-9]+_[0-9]+(_paired)?)\.cu$' | LC_ALL=C sort -u)
if [ ${#files[@]} -gt 0 ]; then known=("${files[@]}"); fi
host=() device=()
for file in "${known[@]}"; do
  case $file in *.cu) device+=("$file") ;; *) host+=("$file") ;; esac
done
if ! ls -d src/*/ src/*/*/ | grep -q . || [ ${#host[@]} -eq 0 ] && [ ${#device[@]} -eq 0 ]; then
  echo "tidy: no files found" >&2
  exit 1
fi

# A unit includes sources on purpose; g++ flags that clang does not know are no findings.
checks=-bugprone-suspicious-include
[ $deep = 1 ] || checks=$checks,-clang-analyzer-*
jobs=$(scripts/jobs.sh)
code=0
if [ ${#host[@]} -gt 0 ]; then
  printf '%s\0' "${host[@]}" | xargs -0 -n 1 -P "$jobs" clang-tidy -p "$build" --quiet --checks="$checks" \
    --extra-arg=-Wno-unknown-warning-option || code=1
fi
toolkit=$(sed -n 's/^CUDAToolkit_INCLUDE_DIRECTORIES:.*=//p; s/^CUDAToolkit_CUDA_RUNTIME_INCLUDE:.*=//p' "$build/CMakeCache.txt" | head -1)
toolkit=${toolkit:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")/include}
if [ ${#device[@]} -gt 0 ] && [ -e "$toolkit/cuda_runtime_api.h" ]; then
  printf '%s\0' "${device[@]}" | xargs -0 -n 1 -P "$jobs" -I{} clang-tidy --quiet --checks="$checks" {} -- \
    -std=c++20 -x cuda --cuda-host-only -nocudainc -nocudalib -isystem scripts/tidy -isystem "$toolkit" \
    -Iinclude -Isrc -I"$build" -DMOESAIC_HAS_CUDA=1 || code=1
elif [ ! -e "$toolkit/cuda_runtime_api.h" ]; then
  echo "tidy: skipped the .cu files: no CUDA toolkit"
fi
echo "tidy: ${#host[@]} host and ${#device[@]} device units, $([ $code = 0 ] && echo clean || echo findings above)"
exit $code
