// Loading physical experts: parameters with one row per expert slot of this rank, redundant copies
// included, the views of them that load balancing moves, and the names under which checkpoints hold
// them. The files themselves are read by a Checkpoint, single tensors taken by a WeightLoader
// (weight_loader.h), both of which give the source that is loaded here; building a backend from the
// result is make_stacked_source (experts.h).
// Read by: engines with a load balancer of their own.
// Source: docs/spec/checkpoints.md sections 6.1 and 7, docs/spec/parallel.md sections 2 and 8.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

enum class ExpertShard : std::uint8_t { kW1, kW2, kW3 };  // gate, down, up
std::string_view expert_shard_name(ExpertShard shard);    // "w1", "w2", "w3"

// One rule of name mapping: a tensor "...experts.3.gate_proj.weight" belongs to shard w1 of
// parameter "...experts.w13_weight" of the physical experts that hold logical expert 3.
struct ExpertParamsMapping {
  std::string param;    // "experts.w13_" or "experts.w2_"
  std::string pattern;  // "experts.3.gate_proj."
  std::int64_t physical_expert = 0;
  ExpertShard shard = ExpertShard::kW1;
  bool operator==(const ExpertParamsMapping&) const = default;
};

// Rules for num_experts + num_redundant physical experts in ascending order, w1, w2, w3 of each;
// redundant expert num_experts + j holds logical expert j mod num_experts.
//   gate, down, up  names of the checkpoint's linears; `up` empty: not gated, `gate` is what the
//                   family calls its only first projection, and there are no rules for w3
//   base_layer      parameters are wrapped by adapters: "base_layer." follows the name
// kInvalidArgument for counts out of range or an empty name.
Result<std::vector<ExpertParamsMapping>> make_expert_params_mapping(
    std::string_view gate, std::string_view down, std::string_view up, std::int64_t num_experts,
    std::int64_t num_redundant = 0, bool base_layer = false);

// Where a checkpoint's tensor goes: every physical expert that wants it, in the order of the rules.
// A pattern counts at the beginning of `name` or behind a dot, so that "shared_experts.1.w1." is
// none. Empty for a tensor of no expert.
struct ExpertParamTarget {
  std::string param;  // the full name: "model.layers.3.mlp.experts.w13_weight"
  std::int64_t physical_expert = 0;
  ExpertShard shard = ExpertShard::kW1;
  bool operator==(const ExpertParamTarget&) const = default;
};
std::vector<ExpertParamTarget> expert_param_targets(std::span<const ExpertParamsMapping> mapping,
                                                    std::string_view name);

// A parameter as one row per expert, [E_l, elements of one expert]: the same memory and device.
//   parameter  [E_l, ...], contiguous; or [E_l, a, b] whose last two axes are transposed in memory,
//              which is presented as if they were not (scales that a kernel wants column-major)
// kInvalidShape for a scalar, kInvalidLayout for any other strides; both name `field`.
Result<TensorView> expert_rows(std::string_view field, TensorView parameter);

// The parameters of this rank's expert slots.
class ExpertWeightLoader {
 public:
  // Which slots there are and which are this rank's: rank r of ep_size has slots r*P/ep_size to
  // (r+1)*P/ep_size - 1, as in eplb.h.
  struct Options {
    std::vector<std::int32_t> physical_to_logical;  // [P]: the logical expert in each slot
    int ep_size = 1, ep_rank = 0;
  };

  // Reads from `source`, whose experts are all logical ones, each that this rank needs once, and
  // fills every slot that holds it. Memory: the parameters, and what the source needs.
  // kInvalidArgument: P does not divide by ep_size, a rank outside, a logical expert outside
  // [0, num_logical) or without any slot, tensors in memory of a GPU. kInvalidShape, kInvalidDType:
  // experts that differ or do not fill whole bytes (names tensor and expert). Errors of the source; kOutOfMemory.
  static Result<ExpertWeightLoader> load(ExpertSource& source, std::int64_t num_logical,
                                         const Options& options);

  std::int64_t num_local_experts() const;  // E_l = P / ep_size
  // The logical expert in each local slot.
  std::span<const std::int32_t> local_experts() const;
  // All parameters, for make_stacked_source. Valid while this object is.
  StackedExpertWeights weights() const;

  // Every parameter that moves with its expert, as rows (expert_rows): writing row e changes local
  // slot e and nothing else. Static activation scales, which are each expert's own, are among them.
  // Valid while this object is.
  struct Rows {
    std::string_view name;  // "w13", "w13_scale" ...
    TensorView rows;
  };
  std::vector<Rows> get_expert_weights();

  ExpertWeightLoader(ExpertWeightLoader&&) noexcept;
  ExpertWeightLoader& operator=(ExpertWeightLoader&&) noexcept;
  ~ExpertWeightLoader();

 private:
  struct Impl;
  explicit ExpertWeightLoader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
