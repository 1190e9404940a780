// Which entries of a quantisation's configuration may concern a layer's experts, and what it costs to
// match them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "checkpoint/config/quant_config.h"

namespace moesaic::checkpoint {

// The description with those entries alone that some expert's projection may match (and all of
// `only`); of each other one, none does. Without the entries of whole names of projections, which are
// looked up (`named`): those of parts of names are among skips and overrides.
QuantConfig narrowed(const QuantConfig& quant, std::string_view experts,
                     std::span<const std::string_view> projections);

// The expert whose projection has this name, -1: it is none of theirs.
std::int64_t expert_of(std::string_view name, std::string_view experts,
                       std::span<const std::string_view> projections);

// Steps that it takes at most to match one name with all entries, where a step is about one comparison
// of bytes.
std::uint64_t entries_cost(const QuantConfig& quant);

}  // namespace moesaic::checkpoint
