// What the files of the load balancer share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic::eplb {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace moesaic::eplb
