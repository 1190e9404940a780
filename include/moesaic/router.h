// Router: router_logits -> topk_weights, topk_ids. Source: docs/spec/routing.md sections 2 to 9.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "moesaic/device.h"
#include "moesaic/device_functions.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// (hidden_states, router_logits, renormalize) -> fills weights [M, k] F32 and ids [M, k] I32, both
// contiguous. Ids are logical, 0 to E - 1, or -1 for an empty slot; anything else is refused.
using CustomRoutingFn =
    std::function<Status(ConstTensorView hidden_states, ConstTensorView router_logits,
                         bool renormalize, TensorView topk_weights, TensorView topk_ids)>;
// Receives logical ids [M, slots] I32, before the EPLB mapping.
using RoutingCaptureFn = std::function<void(ConstTensorView topk_ids)>;

// Expert load balancing: logical -> physical mapping and load recording (docs/spec/routing.md section
// 8). Views, not owned; all three must be present.
struct EplbState {
  std::span<const std::int32_t> logical_to_physical;  // [E, max_replicas], -1 padded
  std::span<const std::int32_t> replica_count;        // [E], 1 to max_replicas
  std::span<std::int32_t> load;  // [P] physical experts, added to (saturating) when record
  std::int64_t max_replicas = 0;
  bool record = false;
};

class Router {
 public:
  struct Options {
    // What to compute. routed_scaling_factor multiplies the weights after renormalisation unless
    // scale_on_output; with methods llama4, custom and simulated, where the router has no place
    // for it, it must be 1 or scale_on_output be set. Numbers that the method does not read (p_norm,
    // jitter_eps; without renormalisation by the sum renorm_floor and renorm_epsilon) keep their
    // defaults. An impossible grouping (num_experts <=
    // num_expert_group, or not a multiple) becomes ungrouped top-k: spec() and name() say so, and a
    // warning goes to the log sink. (FusedMoE refuses such a layer.)
    RoutingSpec spec;
    // [E + zero experts] F32, copied; present iff spec.has_correction_bias.
    ConstTensorView correction_bias;
    // [E] F32, copied; present iff spec.has_expert_scale: the last factor of a weight, after
    // renormalisation and routed_scaling_factor.
    ConstTensorView expert_scale;
    ConstTensorView hash_table;  // kHash: [vocab, k] I32, copied
    // kHash, optional: input ids in [vision_token_base, vision_token_base + 5) skip the table and
    // take the top-k of score + vision_bias ([E] F32, copied). Base 0: no such tokens.
    ConstTensorView vision_bias;
    std::int64_t vision_token_base = 0;
    CustomRoutingFn custom;            // kCustom, on the CPU
    DeviceRoutingFn custom_on_device;  // kCustom, on a GPU
    std::string simulation_strategy;   // kSimulated: "uniform_random", "normal_routing" or
                                       // a registered name
    std::uint64_t seed = 0;            // kSimulated: same seed and shape, same ids, on every call
    // Constant slots appended to every row after scaling: ids E, E + 1, ...
    std::int64_t num_fused_shared_experts = 0;
    float shared_expert_weight = 1.0F;
    RoutingCaptureFn capture;
    int num_threads = 0;  // at most; 0: one per core this process may use
    // Where a call's tensors are, and who routes. kUnsupported on a GPU: simulated routing, a custom
    // function or a capture callback on the host, fused shared experts with custom routing, more than
    // 1024 columns.
    Device device = Device::cpu();
  };
  // Validates the whole combination: each refusal names the field, its value and what is needed.
  // kInvalidArgument (values, missing or unexpected parts), kInvalidShape, kInvalidDType,
  // kInvalidLayout, kNotFound (strategy name), kUnsupported, kOutOfMemory.
  static Result<Router> create(const Options& options);

  struct Args {
    // [M, H]; needed by zero experts, and what a custom function gets; otherwise not looked at and
    // best absent. Rows may be apart (not on a GPU).
    ConstTensorView hidden_states;
    ConstTensorView router_logits;    // [M, E + zero experts] F32, BF16 or F16
    ConstTensorView input_ids;        // kHash: [M] I32
    ConstTensorView padding_mask;     // optional [M] U8: non-zero rows get id -1 and weight 0
    const EplbState* eplb = nullptr;  // not on a GPU
    // On a GPU: where the work is launched; select_experts then returns before it is done and may be
    // captured. What only the values of device memory show is no error there: a token id outside the
    // hash table gives a row of id -1 and weight 0, a custom function's id that names nobody an empty
    // slot, and -1 in U32 ids is 2^32 - 1. Every other bit is that of the CPU.
    Stream stream = {};
    TensorView topk_weights;        // out [M, slots()] F32
    TensorView topk_ids;            // out [M, slots()] I32 (or I64, U32; -1 needs a signed type);
                                    // custom routing on a GPU: I32
    TensorView zero_expert_output;  // kZeroExpert alone: out [M, H], F32 or hidden_states' dtype
    // On a GPU: at least workspace_size(M) bytes of its memory, 256-byte aligned, until the work is
    // done.
    std::span<std::byte> workspace = {};
  };
  // All other tensors contiguous; outputs overlap nothing. M = 0 is ordinary.
  // Selection: scores in fp32 (logits widened first), slots in descending order of score (+ bias),
  // ties to the smaller id, ids of a row distinct (not with simulation, nor where a hash table or a
  // custom function repeats itself).
  // Non-finite input: NaN and infinite scores count as 0 (sqrtsoftplus: NaN only), so a NaN row
  // gives ids 0..k-1 and weights 0. Grouped: non-finite logits are not candidates, and a row that
  // cannot fill topk_group groups gives ids 0..k-1 with weight 1/k each, unscaled. Methods that
  // select on raw logits (topk_softmax, llama4, sparse_mixer): NaN loses against every number
  // (of equal rank to -infinity but for sparse_mixer, where it loses) and weighs 0.
  // Renormalisation: divides by the sum of the selected scores, by max(sum, renorm_floor) when that
  // is set, by 1 when the sum is not positive (grouped: by 1e-20 + sum). renorm_epsilon is part of
  // the sum. Groups are ranked by their best candidate; with a correction bias or group_by_best_two
  // by the sum of their two best.
  // Zero experts: zero_expert_output = hidden_states * (sum of the weights of identity experts,
  // scaled as the weights are); their slots become id 0 with weight 0.
  // Deterministic: a row depends on its own inputs only (simulation and EPLB: and on its position).
  // Error of a weight vs exact arithmetic on the same logits and ids: relative
  // <= (k + 16) * 2^-23, for softmax (E + k + max|logit| + 16) * 2^-23 (divided by p_norm where that
  // is below 1: the norm is the root of that order), while the score is a normal fp32 number
  // (sqrtsoftplus: while softplus is one, logits above -87; scores of smaller logits, at most
  // 1.1e-19, have fewer bits, down to 0). Ids differ from exact arithmetic only where scores differ
  // by less than that.
  // Errors: kInvalidShape, kInvalidDType, kInvalidLayout, kInvalidArgument (missing tensors, token
  // ids outside the hash table, inconsistent EPLB state, ids from a callback), kAliasing,
  // kUnsupported (EPLB with fused shared experts), kLimitExceeded (sizes, strides), kOutOfMemory; on
  // a GPU kWorkspaceTooSmall and kDevice. Outputs are undefined after one. On the CPU it allocates
  // nothing with up to 1024 columns.
  Status select_experts(const Args& args) const;
  // select_experts on a GPU and this stream, in the place of args.stream; kUnsupported on the CPU.
  Status enqueue(Stream stream, const Args& args) const;
  // Bytes of Args::workspace for M tokens; 0 on the CPU, and on a GPU but with zero experts.
  // kInvalidArgument for negative tokens.
  Result<std::int64_t> workspace_size(std::int64_t tokens) const;

  std::int64_t slots() const;  // top_k + fused shared experts
  Device device() const;
  const RoutingSpec& spec() const;  // as in force: after the grouping fallback
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
