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
  endif()
  # Contracting a*b+c differently per compiler would make bits depend on the compiler; kernels ask for FMA by name.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
  if(MOESAIC_FAULT_INJECTION)
    target_compile_definitions(${target} PRIVATE MOESAIC_FAULT_INJECTION)
  endif()
  if(MOESAIC_SANITIZE)
    target_compile_options(
      ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${MOESAIC_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
    target_link_options(${target} PUBLIC -fsanitize=${MOESAIC_SANITIZE})
  endif()
endfunction()
