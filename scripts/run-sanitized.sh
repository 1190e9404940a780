#!/usr/bin/env bash
# Runs the tests of a sanitizer build: scripts/run-sanitized.sh asan|tsan [ctest arguments].
set -euo pipefail
cd "$(dirname "$0")/.."
preset=$1
shift
# Tests run side by side: threads that wait for their team leave the processor to other tests.
export OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0
case "$preset" in
  asan)
    # Tests provoke allocation failure on purpose; the allocator then returns null as the real one does.
    # libomp keeps memory by addresses inside it, which looks like a leak. Only the caller of the allocator is
    # looked at, so that what our code allocates in libomp's threads is still found.
    export LSAN_OPTIONS="suppressions=$PWD/scripts/lsan.supp:print_suppressions=0${LSAN_OPTIONS:+:$LSAN_OPTIONS}"
    export ASAN_OPTIONS="malloc_context_size=2:allocator_may_return_null=1:detect_stack_use_after_return=1:strict_string_checks=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
    export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
    ctest --test-dir build/asan --output-on-failure --parallel "$(scripts/jobs.sh)" --no-tests=error "$@"
    ;;
  tsan)
    # libomp is not instrumented; its archer plug-in tells TSan about its barriers, and what TSan
    # sees inside uninstrumented modules is ignored.
    export TSAN_OPTIONS="ignore_noninstrumented_modules=1:halt_on_error=1${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
    ctest --test-dir build/tsan --output-on-failure --parallel "$(scripts/jobs.sh)" --no-tests=error -L threads "$@"
    ;;
  *)
    echo "usage: $0 asan|tsan [ctest arguments]" >&2
    exit 2
    ;;
esac
