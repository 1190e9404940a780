# Compile options of our own code; consumers inherit none of them.
function(moesaic_compile_options target)
  # Flags of the C++ compiler: nvcc has its own (MoesaicCuda.cmake).
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow>)
  if(MOESAIC_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    # The floor of the one binary; faster tiers are compiled per function and chosen at run time.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-march=x86-64-v2>)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-march=armv8-a>)
  endif()
  # Contracting a*b+c differently per compiler would make bits depend on the compiler; kernels ask for FMA by name.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
  # Paths in what is compiled begin at the tree: no machine's are in it, and a compiler cache serves all clones.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>)
  # Position independent code calls and inlines its own functions as other code does.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fno-semantic-interposition>)
  endif()
  if(MOESAIC_FAULT_INJECTION)
    target_compile_definitions(${target} PRIVATE MOESAIC_FAULT_INJECTION)
  endif()
  if(MOESAIC_SANITIZE)
    target_compile_options(
      ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${MOESAIC_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
    target_link_options(${target} PUBLIC -fsanitize=${MOESAIC_SANITIZE})
  endif()
endfunction()

# Sanitizer builds do not optimise code that computes little: clang takes two fifths of the time.
function(moesaic_compile_quickly target)
  if(MOESAIC_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:RelWithDebInfo>>:-O0>)
  endif()
endfunction()

# With CMAKE_UNITY_BUILD a folder's files are one compilation each (four of five compiler seconds go to headers):
# names in anonymous namespaces are unique within a folder. The SIMD tiers stay by themselves, they differ in flags.
function(moesaic_unity_by_folder target)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cc$")
  list(FILTER sources EXCLUDE REGEX "/cpu/tier_[a-z0-9_]*\\.cc$")
  foreach(source ${sources})
    get_filename_component(folder ${source} DIRECTORY)
    file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${folder})
    string(MAKE_C_IDENTIFIER "${folder}" folder)
    set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${folder})
    if(MOESAIC_SANITIZE AND folder MATCHES "^src_(checkpoint|interop|parallel|cuda)")
      # As moesaic_compile_quickly. Options of the sources would keep them out of the folder's compilation.
      set_source_files_properties(${PROJECT_BINARY_DIR}/CMakeFiles/${target}.dir/Unity/unity_${folder}_cxx.cxx
                                  TARGET_DIRECTORY ${target} PROPERTIES COMPILE_OPTIONS $<$<CONFIG:RelWithDebInfo>:-O0>)
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
endfunction()
