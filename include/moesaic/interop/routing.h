// What the original layer (vLLM's) would choose for a configuration, as pure functions: the router,
// the RoutingMethodType that monolithic kernels are told, and the kernel tier of its gate. None of it
// changes what this library computes: its own choices are listed by FusedMoE::explain.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "moesaic/dtype.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic {

// --- RoutingMethodType
// Read by: fused kernels that route inside (FlashInfer's TensorRT-LLM MoE). The numbers are part of
// their interface.
enum class RoutingMethodType : int {
  kDefault = 0,           // softmax -> top-k
  kRenormalize = 1,       // top-k on logits -> softmax over the selected
  kDeepSeekV3 = 2,        // sigmoid + bias -> top-2 sums of groups -> top-k -> renormalise
  kLlama4 = 3,            // top-1 -> sigmoid
  kRenormalizeNaive = 4,  // softmax -> top-k -> renormalise
  kTopK = 5,              // raw top-k values
  kSigmoidRenorm = 6,     // sigmoid -> top-k -> renormalise
  kMiniMax2 = 7,          // sigmoid + bias, ungrouped -> top-k -> renormalise, unscaled
  kSigmoid = 8,           // sigmoid -> top-k
  kUnspecified = 9,
  kDeepseekV4 = 100,  // sqrtsoftplus (+ bias or hash) + renormalise
  kCustom = 101,
  kSimulated = 102,
};
std::string_view routing_method_type_name(RoutingMethodType type);

// num_expert_group unset or 0: ungrouped. routed_scaling_factor unset counts as 1. top_k is
// accepted and not consulted (older versions called sigmoid with k = 1 Llama4).
RoutingMethodType derive_routing_method_type(ScoringFunc scoring, std::int64_t top_k,
                                             bool renormalize,
                                             std::optional<std::int64_t> num_expert_group,
                                             bool has_bias,
                                             std::optional<double> routed_scaling_factor);
// The type of a layer as this library describes it; kUnspecified with an expert scale, which no type
// has.
RoutingMethodType routing_method_type(const RoutingSpec& spec);

// Which router the original's factory makes.
enum class RouterKind : std::uint8_t {
  kSimulator,
  kZeroExpert,
  kGrouped,
  kCustom,
  kBiasedTopK,
  kTopK
};

// What the factory looks at.
struct RouterFactoryInputs {
  bool simulation_strategy = false;
  bool zero_expert_type = false;
  bool use_grouped_topk = false;
  std::optional<std::int64_t> num_expert_group;
  std::optional<std::int64_t> topk_group;
  bool custom_routing_function = false;
  bool has_bias = false;
  bool has_hash_table = false;
  ScoringFunc scoring = ScoringFunc::kSoftmax;
  std::int64_t top_k = 1;
  bool renormalize = false;
  std::optional<double> routed_scaling_factor;
};
// First match of: simulator, zero experts, grouped (dropped again when its type is Unspecified and
// there is one group only), custom, biased (bias or hash table), plain. kInvalidArgument for zero
// experts without a bias, grouping without both group numbers or together with a custom function,
// and a plain router with sqrtsoftplus scoring.
Result<RouterKind> choose_router(const RouterFactoryInputs& inputs);

// --- Gate tiers
// Read by: engines that want the dtype and rounding of the original's logits for a device. Moesaic's
// GateLinear (gate.h) follows none of these rules; the roundings of tiers 1 and 4 are its options.

// What each tier does to dtypes (x: hidden states, W: the gate's compute dtype). Tiers 1 to 3 belong
// to devices with small-batch and widening GEMM kernels (sm_90, sm_10x); a plain CPU always takes the
// fallback.
enum class GateTier : std::uint8_t {
  kSmallBatch,    // 1: bf16 x and W, M <= 16; one rounding to out_dtype (unset: BF16)
  kFp32,          // 2: fp32 W; logits F32 whatever out_dtype says
  kWideningGemm,  // 3: bf16 x and W; the fp32 accumulator is the logit
  kFallback       // 4: logits rounded to W's dtype, then converted to out_dtype
};
// "small_batch", "fp32", "widening_gemm", "fallback"
std::string_view gate_tier_name(GateTier tier);

// A CUDA device by its compute capability, or a CPU (no capability).
struct GateDevice {
  int sm_major = 0;
  int sm_minor = 0;
  static constexpr GateDevice cpu() { return {}; }
  static constexpr GateDevice cuda(int major, int minor) { return {major, minor}; }
  bool operator==(const GateDevice&) const = default;
};

// The tier state machine as a value: which tier a call takes and which dtype it returns.
class GateTierRules {
 public:
  struct Problem {
    GateDevice device;
    DType weight_dtype = DType::kBF16;  // params_dtype: as created, before force_fp32_compute
    std::int64_t num_experts = 0;       // E
    std::int64_t hidden_size = 0;       // H
    bool has_bias = false;
    std::optional<DType> out_dtype;
    // Widen the weight to F32 where the special tiers do not apply.
    bool force_fp32_compute = false;
  };
  explicit GateTierRules(const Problem& problem);

  // Device has the special kernels: capability exactly 9.0 or family 10.x. Family 12.x has not.
  bool sm_ok() const { return sm_ok_; }
  bool special() const { return special_; }  // sm_ok and no bias
  // Dtype the linear computes in: F32 when forced and not special, else weight_dtype.
  DType compute_dtype() const { return compute_dtype_; }
  bool allow_dsv3() const { return allow_dsv3_; }      // tier 1
  bool allow_fp32() const { return allow_fp32_; }      // tier 2
  bool allow_cublas() const { return allow_cublas_; }  // tier 3
  std::optional<DType> out_dtype() const { return out_dtype_; }

  // kInvalidArgument when out_dtype is set already, even to the same value; kInvalidDType unless
  // F32, BF16 or F16 (nothing is stored then). Recomputes allow_cublas only, and only from false.
  Status set_out_dtype(DType dtype);

  // The first tier whose conditions hold. M is looked at on every call, never frozen.
  GateTier tier(std::int64_t num_tokens, DType hidden_dtype) const;
  // Dtype of the logits for such an input. kInvalidDType when hidden_dtype is not F32, BF16 or F16,
  // or when it differs from the compute dtype in the fallback tier and out_dtype is unset (there is
  // no implicit cast).
  Result<DType> output_dtype(std::int64_t num_tokens, DType hidden_dtype) const;

 private:
  bool sm_ok_ = false;
  bool special_ = false;
  bool allow_dsv3_ = false;
  bool allow_fp32_ = false;
  bool allow_cublas_ = false;
  DType compute_dtype_ = DType::kBF16;
  std::optional<DType> out_dtype_;
};

}  // namespace moesaic
