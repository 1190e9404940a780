# SIMD tiers of the CPU: compile options of what belongs to one, and builds without those that this machine's
# processor lacks.
set(MOESAIC_CPU_TIERS all CACHE STRING "SIMD tiers to build: all, or host (those that this machine's processor runs)")
set_property(CACHE MOESAIC_CPU_TIERS PROPERTY STRINGS all host)
if(NOT MOESAIC_CPU_TIERS MATCHES "^(all|host)$")
  message(FATAL_ERROR "MOESAIC_CPU_TIERS: got '${MOESAIC_CPU_TIERS}', need all or host")
endif()

# moesaic_tier_source(target tier source): the source compiles kernels of the tier. In a build for the host alone it
# has none where the processor lacks what the tier needs; the tier is "not in this build" then.
function(moesaic_tier_source target tier source)
  set(options "")
  if(NOT MOESAIC_SANITIZE)
    # Kernels are what -O3's unrolling is for, whatever the build type of the rest. Inner loops start at a cache
    # line: where they happen to lie makes 1 % of difference otherwise.
    set(options -O3 -falign-functions=64 -falign-loops=64)
  elseif(MOESAIC_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # Accesses are checked by a call each, not in line: kernels are the longest functions, and compile in half the time.
    set(options -O1 -mllvm -asan-instrumentation-with-call-threshold=0)
  else()
    set(options -O1)
  endif()
  set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS "${options}")

  set(needs_avx2 avx2 fma f16c)
  set(needs_avx2_pairs ${needs_avx2})
  set(needs_avx512 avx512f avx512vl avx512dq avx512bw)
  set(needs_avx512_bf16 ${needs_avx512} avx512_bf16 avx512vbmi avx512_vnni)
  set(needs_amx ${needs_avx512_bf16} amx_tile amx_bf16 amx_int8)
  if(MOESAIC_CPU_TIERS STREQUAL "host" AND EXISTS /proc/cpuinfo)
    file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
    string(REGEX MATCHALL "[a-z0-9_]+" flags "${flags}")
    set(missing ${needs_${tier}})
    list(REMOVE_ITEM missing ${flags})
    if(missing)
      set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES COMPILE_DEFINITIONS
                                  "HWY_DISABLED_TARGETS=(HWY_SSE4|HWY_AVX2|HWY_AVX3|HWY_AVX3_DL)")
    endif()
  endif()
endfunction()
