// Router: router_logits -> topk_weights, topk_ids. Source: spec routing.md sections 2 to 9.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "moesaic/spec.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// (hidden_states, router_logits, top_k, renormalize) -> fills weights [M, k] F32 and ids [M, k]
// I32.
using CustomRoutingFn =
    std::function<Status(ConstTensorView hidden_states, ConstTensorView router_logits,
                         bool renormalize, TensorView topk_weights, TensorView topk_ids)>;
// Receives logical ids before the EPLB mapping.
using RoutingCaptureFn = std::function<void(ConstTensorView topk_ids)>;

// Expert load balancing: logical -> physical mapping and load recording (spec routing.md section
// 8). Views, not owned.
struct EplbState {
  std::span<const std::int32_t> logical_to_physical;  // [E, max_replicas], -1 padded
  std::span<const std::int32_t> replica_count;        // [E], >= 1
  std::span<std::int32_t> load;                       // [P] physical experts, added to when record
  std::int64_t max_replicas = 0;
  bool record = false;
};

class Router {
 public:
  struct Options {
    RoutingSpec spec;
    ConstTensorView
        correction_bias;  // [E + zero experts] F32, copied; present iff spec.has_correction_bias
    ConstTensorView hash_table;                 // kHash: [vocab, k] I32, copied
    CustomRoutingFn custom;                     // kCustom
    std::string simulation_strategy;            // kSimulated: "uniform_random" or "normal_routing"
    std::uint64_t seed = 0;                     // kSimulated
    std::int64_t num_fused_shared_experts = 0;  // constant slots appended to every row
    float shared_expert_weight = 1.0F;
    RoutingCaptureFn capture;
    int num_threads = 0;
  };
  // Validates the whole combination: each refusal names the field, its value and what is needed.
  static Result<Router> create(const Options& options);

  struct Args {
    ConstTensorView
        hidden_states;  // [M, H]; needed by custom routing and zero experts, else may be absent
    ConstTensorView router_logits;  // [M, E + zero experts] F32, BF16 or F16
    ConstTensorView input_ids;      // kHash: [M] I32
    ConstTensorView padding_mask;   // optional [M] U8: non-zero rows get id -1 and weight 0
    const EplbState* eplb = nullptr;
    TensorView topk_weights;        // out [M, slots()] F32
    TensorView topk_ids;            // out [M, slots()] I32 (or I64, U32; -1 needs a signed type)
    TensorView zero_expert_output;  // kZeroExpert: out [M, H], dtype of hidden_states
  };
  // Ties go to the smaller id; non-finite logits as specified; weights always F32. Deterministic
  // per row.
  Status select_experts(const Args& args) const;

  std::int64_t slots() const;  // top_k + fused shared experts
  const RoutingSpec& spec() const;
  // "softmax_topk_renorm", "sigmoid_bias_grouped_topk", ...: what explain and inspect print.
  std::string name() const;

  Router(Router&&) noexcept;
  Router& operator=(Router&&) noexcept;
  ~Router();

 private:
  struct Impl;
  explicit Router(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
