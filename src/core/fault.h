// Fault points: places where a test build can be told to compute wrongly, to prove that a test
// notices. In an ordinary build MOESAIC_FAULT(name) is the constant false and costs nothing. In a
// build with MOESAIC_FAULT_INJECTION it is true when the environment variable MOESAIC_FAULT equals
// the name.
#pragma once

#ifdef MOESAIC_FAULT_INJECTION
#include <cstdlib>
#include <cstring>
namespace moesaic {
inline const char* active_fault() {
  static const char* const name = std::getenv("MOESAIC_FAULT");
  return name != nullptr ? name : "";
}
}  // namespace moesaic
#define MOESAIC_FAULT(name) (std::strcmp(::moesaic::active_fault(), #name) == 0)
#else
#define MOESAIC_FAULT(name) false
#endif
