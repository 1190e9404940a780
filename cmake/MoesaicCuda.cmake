# The CUDA part: found once, compiled for sm_90a into the one library. MOESAIC_CUDA=AUTO builds it when
# nvcc 12.4 or newer is there; ON insists; OFF leaves it out. Nothing of it is needed to run on a CPU.
set(MOESAIC_CUDA "AUTO" CACHE STRING "Build the CUDA backends: AUTO, ON or OFF")
set_property(CACHE MOESAIC_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MOESAIC_HAS_CUDA OFF)

if(NOT MOESAIC_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit 12.4 QUIET)
  if(CUDAToolkit_FOUND AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  # Only sm_90a has the instructions the kernels are written in.
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  include(CheckLanguage)
  if(CUDAToolkit_FOUND)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(MOESAIC_HAS_CUDA ON)
  elseif(MOESAIC_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOESAIC_CUDA=ON: need nvcc 12.4 or newer")
  endif()
endif()
message(STATUS "CUDA backends: ${MOESAIC_HAS_CUDA}")

# moesaic_cuda_sources(files... [OTHERWISE none.cc] [TARGET target]): sources of the CUDA part, .cu or
# host C++ that needs the runtime, of target moesaic. Without CUDA the other file is compiled instead: it
# has the functions that the rest calls, which refuse. A folder has one such file, because these functions
# name types of the folder's own level.
function(moesaic_cuda_sources)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "OTHERWISE;TARGET" "")
  if(NOT arg_TARGET)
    set(arg_TARGET moesaic)
  endif()
  if(MOESAIC_HAS_CUDA)
    target_sources(${arg_TARGET} PRIVATE ${arg_UNPARSED_ARGUMENTS})
  elseif(arg_OTHERWISE)
    target_sources(${arg_TARGET} PRIVATE ${arg_OTHERWISE})
  endif()
endfunction()

# After the target exists: runtime, definition, flags. Device code is most of a program's size: it is
# compressed for size where nvcc can (12.8 and newer; a kernel is unpacked when it is first used).
# MOESAIC_CUDA_LINEINFO adds the source lines that profilers show, which are most of it again.
option(MOESAIC_CUDA_LINEINFO "Source lines in CUDA kernels, for profilers" OFF)
# For machines that only show that the kernels compile: a third of the compiler's time, slow kernels. They have
# stacks, for which CUDA makes room when a larger one is launched first, once what runs is done: ranks that share a
# GPU may wait for each other then.
option(MOESAIC_CUDA_QUICK "Compile kernels quickly rather than well, where nvcc can" OFF)
function(moesaic_cuda_options target)
  if(NOT MOESAIC_HAS_CUDA)
    return()
  endif()
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static)
  target_compile_definitions(${target} PUBLIC MOESAIC_HAS_CUDA=1)
  set(flags -std=c++20 --expt-relaxed-constexpr)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND flags --compress-mode=size)
  endif()
  if(MOESAIC_CUDA_LINEINFO)
    list(APPEND flags -lineinfo)
  endif()
  if(MOESAIC_CUDA_QUICK AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
    list(APPEND flags --Ofast-compile=max)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()
