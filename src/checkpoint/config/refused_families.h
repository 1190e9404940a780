// Families that are known and not supported, with the reason that their users read.
#pragma once

#include <span>
#include <string_view>

namespace moesaic::checkpoint {

struct RefusedFamily {
  std::string_view model_type;
  std::string_view reason;  // what a layer here cannot compute; continues "not supported: "
};

std::span<const RefusedFamily> refused_families();
// nullptr for any other model_type.
const RefusedFamily* find_refused_family(std::string_view model_type);

}  // namespace moesaic::checkpoint
