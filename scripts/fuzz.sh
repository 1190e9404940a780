#!/bin/sh
# Builds the fuzz targets with clang, AddressSanitizer and UndefinedBehaviorSanitizer and runs all of them
# side by side. Fails on any finding, which is then in build/fuzz/findings.
#   FUZZ_SECONDS  per target (60)
#   FUZZ_TARGETS  which (safetensors shard_index config gguf loader)
set -eu
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-60}
targets=${FUZZ_TARGETS:-safetensors shard_index config gguf loader}
build=build/fuzz

if ! command -v clang++ >/dev/null; then
  echo "fuzz.sh: clang++ is needed (libFuzzer): scripts/install-deps.sh all" >&2
  exit 1
fi
cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DMOESAIC_BUILD_TESTS=OFF -DMOESAIC_BUILD_TOOLS=OFF \
  -DMOESAIC_BUILD_FUZZERS=ON -DMOESAIC_CUDA=OFF -DCMAKE_UNITY_BUILD=ON >$build-configure.log 2>&1 || { cat $build-configure.log >&2; exit 1; }
cmake --build $build --target fuzzers -j "$(scripts/jobs.sh)"

mkdir -p $build/findings
pids=
for name in $targets; do
  mkdir -p "$build/corpus-$name"
  # New inputs go to the build folder; the seeds are only read.
  "$build/fuzz/fuzz_$name" "$build/corpus-$name" "fuzz/corpus/$name" -dict=fuzz/json.dict \
    -max_total_time="$seconds" -max_len=16384 -rss_limit_mb=2048 -timeout=10 \
    -artifact_prefix="$build/findings/$name-" -print_final_stats=1 >"$build/$name.log" 2>&1 &
  pids="$pids $name:$!"
done

failed=0
for item in $pids; do
  name=${item%%:*}
  if wait "${item#*:}"; then
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$build/$name.log")
    echo "fuzz_$name: $runs runs in $seconds s, no finding"
  else
    echo "fuzz_$name: FINDING, see $build/$name.log and $build/findings" >&2
    tail -40 "$build/$name.log" >&2
    failed=1
  fi
done
exit $failed
