#include "loader_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "errors.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

constexpr std::array<std::pair<std::string_view, ExpertStorage>, 9> kStorages = {
    {{"per_expert", ExpertStorage::kPerExpert},
     {"per_expert_up_first", ExpertStorage::kPerExpertUpFirst},
     {"stacked", ExpertStorage::kStacked},
     {"flat", ExpertStorage::kFlat},
     {"fused_nt", ExpertStorage::kFusedNT},
     {"fused_nn", ExpertStorage::kFusedNN},
     {"mxfp4_interleaved", ExpertStorage::kMxfp4Interleaved},
     {"fused_nn_interleaved", ExpertStorage::kFusedNNInterleaved},
     {"fused_nt_interleaved", ExpertStorage::kFusedNTInterleaved}}};

ExpertStorage storage_of(std::string_view name) {
  const auto* const row = std::find_if(kStorages.begin(), kStorages.end(),
                                       [&](const auto& known) { return known.first == name; });
  if (row != kStorages.end()) return row->second;
  std::vector<std::string_view> names;
  names.reserve(kStorages.size());
  for (const auto& known : kStorages) names.push_back(known.first);
  raise(StatusCode::kInvalidArgument,
        fmt::format("storage: got \"{}\", need one of {}", name, fmt::join(names, ", ")));
}

std::string_view storage_name(ExpertStorage storage) {
  const auto* const row = std::find_if(kStorages.begin(), kStorages.end(),
                                       [&](const auto& known) { return known.second == storage; });
  return row->first;
}

ExpertPlacement placement_of(std::string_view name) {
  for (const ExpertPlacement placement : {ExpertPlacement::kLinear, ExpertPlacement::kRoundRobin}) {
    if (expert_placement_name(placement) == name) return placement;
  }
  raise(StatusCode::kInvalidArgument,
        fmt::format("placement: got \"{}\", need {} or {}", name,
                    expert_placement_name(ExpertPlacement::kLinear),
                    expert_placement_name(ExpertPlacement::kRoundRobin)));
}

void bind_expert_names(nb::module_& m) {
  nb::class_<ExpertNames>(
      m, "ExpertNames",
      "How the tensors of a layer's experts are called, for models of no known family.")
      .def(
          "__init__",
          [](ExpertNames* self, std::string block, std::optional<std::string> gate,
             std::optional<std::string> up, std::string down, const std::string& storage,
             std::string weight_suffix, std::string scale_suffix, std::string bias_suffix) {
            const ExpertStorage known = storage_of(storage);
            new (self) ExpertNames;
            self->block = std::move(block);
            self->gate = std::move(gate).value_or("");
            self->up = std::move(up).value_or("");
            self->down = std::move(down);
            self->storage = known;
            self->weight_suffix = std::move(weight_suffix);
            self->scale_suffix = std::move(scale_suffix);
            self->bias_suffix = std::move(bias_suffix);
          },
          nb::kw_only(), nb::arg("block") = "mlp", nb::arg("gate") = "experts.{e}.gate_proj",
          nb::arg("up") = "experts.{e}.up_proj", nb::arg("down") = "experts.{e}.down_proj",
          nb::arg("storage") = "per_expert", nb::arg("weight_suffix") = ".weight",
          nb::arg("scale_suffix") = ".weight_scale_inv", nb::arg("bias_suffix") = "_bias",
          nb::sig("def __init__(self, *, block: str = 'mlp', "
                  "gate: str | None = 'experts.{e}.gate_proj', "
                  "up: str | None = 'experts.{e}.up_proj', down: str = 'experts.{e}.down_proj', "
                  "storage: str = 'per_expert', weight_suffix: str = '.weight', "
                  "scale_suffix: str = '.weight_scale_inv', bias_suffix: str = '_bias') -> None"),
          "block: what all names begin with; gate, up, down: modules in it, {e} is the expert's "
          "number. storage: per_expert, per_expert_up_first, stacked, flat, fused_nt, fused_nn, "
          "mxfp4_interleaved, fused_nn_interleaved or fused_nt_interleaved; where one tensor holds "
          "gate and up, gate names it and up is None. Suffixes: of plain weights, of the scales "
          "of FP8 blocks and of biases; other formats have names of their own.")
      .def_ro("block", &ExpertNames::block)
      .def_ro("gate", &ExpertNames::gate)
      .def_ro("up", &ExpertNames::up)
      .def_ro("down", &ExpertNames::down)
      .def_prop_ro("storage",
                   [](const ExpertNames& n) { return std::string(storage_name(n.storage)); })
      .def("__repr__", [](const ExpertNames& n) {
        return fmt::format("ExpertNames({}: {}, {}, {}, {})", storage_name(n.storage), n.block,
                           n.gate, n.up, n.down);
      });
}

void bind_parallel(nb::module_& m) {
  nb::class_<ParallelConfig>(m, "Parallel",
                             "Where this process stands among its peers, and so which experts, or "
                             "which slice of each, it has.")
      .def(
          "__init__",
          [](ParallelConfig* self, int tp_size, int tp_rank, int ep_size, int ep_rank,
             const std::string& placement) {
            ParallelConfig config;
            config.tp_size = tp_size;
            config.tp_rank = tp_rank;
            config.ep_size = ep_size;
            config.ep_rank = ep_rank;
            config.placement = placement_of(placement);
            check(config.validate());
            new (self) ParallelConfig(config);
          },
          nb::kw_only(), nb::arg("tp_size") = 1, nb::arg("tp_rank") = 0, nb::arg("ep_size") = 1,
          nb::arg("ep_rank") = 0, nb::arg("placement") = "linear",
          "tp: each rank has a slice of every expert's width. ep: each rank has whole experts, one "
          "after the other (linear) or every ep-th (round_robin). One of them is 1.")
      .def_ro("tp_size", &ParallelConfig::tp_size)
      .def_ro("tp_rank", &ParallelConfig::tp_rank)
      .def_ro("ep_size", &ParallelConfig::ep_size)
      .def_ro("ep_rank", &ParallelConfig::ep_rank)
      .def_prop_ro(
          "placement",
          [](const ParallelConfig& p) { return std::string(expert_placement_name(p.placement)); })
      .def(
          "local_experts",
          [](const ParallelConfig& p, std::int64_t num_experts) {
            return unwrap(local_expert_ids(num_experts, p));
          },
          nb::arg("num_experts"), "Ids of the experts of which this rank has weights, ascending.")
      .def("__repr__", [](const ParallelConfig& p) {
        return fmt::format("Parallel(tp {} of {}, ep {} of {}, {})", p.tp_rank, p.tp_size,
                           p.ep_rank, p.ep_size, expert_placement_name(p.placement));
      });
}

}  // namespace

ParallelConfig parallel_of(nb::handle parallel) {
  if (parallel.is_none() || MOESAIC_FAULT(python_parallel_lost)) return {};
  if (!nb::isinstance<ParallelConfig>(parallel)) {
    throw nb::type_error("parallel: need a moesaic.Parallel");
  }
  return nb::cast<ParallelConfig>(parallel);
}

void bind_loader_options(nb::module_& m) {
  bind_expert_names(m);
  bind_parallel(m);
}

}  // namespace moesaic::python
