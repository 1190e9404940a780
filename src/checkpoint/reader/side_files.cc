#include "checkpoint/reader/side_files.h"

#include <fmt/format.h>

#include <utility>

namespace moesaic::checkpoint {

Status SideFiles::add(std::string_view name, std::string_view json) {
  MOESAIC_ASSIGN_OR_RETURN(QuantConfig found, parse_quant_side_file(name, json));
  if (!from_.empty() && !same_quantisation(found, quant_)) {
    return {StatusCode::kAmbiguousFormat,
            fmt::format("{}: describes the quantisation otherwise than {}; need one description",
                        name, from_)};
  }
  quant_ = std::move(found);
  from_ = name;
  return {};
}

}  // namespace moesaic::checkpoint
