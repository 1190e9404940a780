// What a source's description says of its routed experts one by one, which a description of the
// other linears has no use for.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace moesaic::checkpoint {

// The description without the entries of its lists that can name nothing but one of `modules` or
// what lies inside: model.layers.3.mlp.experts.0.up_proj, of every expert in ModelOpt's mixed
// precision. Linear in the entries. A map that says how every module is stored keeps one of them
// where it has no others: empty it would be no description.
nlohmann::ordered_json without_entries_of(nlohmann::ordered_json description,
                                          const std::vector<std::string>& modules);

}  // namespace moesaic::checkpoint
