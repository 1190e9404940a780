// Which tensors one MoE layer must consist of: names, shapes and dtypes, from the family's table
// and the layer's spec. Pure; finding them in files is layer_binding.h.
// Source: docs/spec/checkpoints.md sections 3.1, 3.4 and 4.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config/config.h"
#include "checkpoint/config/families.h"
#include "checkpoint/config/linear_format.h"
#include "checkpoint/config/linear_tensors.h"
#include "moesaic/spec.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

// How one layer is stored, decided once from the configuration and the names that exist.
struct LayerSource {
  MoeLayerSpec spec;
  const Family* family = nullptr;
  const ExpertLayout* layout = nullptr;
  const ExpertLayout* shared_layout = nullptr;
  std::string_view weight_suffix;    // of the layout's spellings
  std::string_view gate_weight;      // of the family's spellings
  std::string_view correction_bias;  // likewise
  LinearFormat experts, shared;
  // Dtype of routed experts' weights once loaded: F32 where the files have plain ones of several
  // types, which F32 holds exactly.
  DType experts_dtype = DType::kBF16;
  DType shared_dtype = DType::kBF16;
  Scheme shared_quant;  // of a shared expert, once values were looked at
  bool experts_mixed = false, shared_mixed = false;
  // Weights of single experts whose FP8 scales lie in one tensor of all, as transformers saves
  // them.
  bool scales_stacked = false;
  // Experts that were no linears, which the configuration has quantised: they are plain.
  bool left_plain = false;

  bool has_shared() const { return spec.shared.intermediate_size > 0; }
  // Full name of a module of the shared expert.
  std::string shared_module(std::string_view module) const;
  // Full names of what lies in the layer beside its block, and of the router's tensors.
  std::string beside(std::string_view name) const;
  std::string router_tensor(std::string_view name) const;
  // The module that holds the experts, as skip lists call it.
  std::string experts_module() const;
};

// A set of element types that a tensor may have.
class DTypeSet {
 public:
  constexpr DTypeSet(std::initializer_list<DType> dtypes) {
    for (const DType dtype : dtypes) bits_ |= 1U << static_cast<unsigned>(dtype);
  }
  explicit DTypeSet(const std::vector<DType>& dtypes) {
    for (const DType dtype : dtypes) bits_ |= 1U << static_cast<unsigned>(dtype);
  }
  constexpr bool contains(DType dtype) const {
    return dtype <= DType::kU4 && (bits_ >> static_cast<unsigned>(dtype) & 1U) != 0;
  }
  std::string to_string() const;  // "BF16, F16 or F32"

 private:
  std::uint32_t bits_ = 0;
};

enum class LayerPart : std::uint8_t {
  kGateWeight,
  kGateBias,
  kCorrectionBias,
  kHashTable,
  kRouterScale,  // Family::input_norm
  kExpertsNorm,
  kExpertScale,
  kSharedGate,
  kShared,  // the shared expert's projections
  kExpert,  // the routed experts' projections
};
// What only the layer's own gate reads.
constexpr bool is_gate(LayerPart part) {
  return part == LayerPart::kGateWeight || part == LayerPart::kGateBias ||
         part == LayerPart::kRouterScale;
}
enum class Projection : std::uint8_t { kGate, kUp, kDown };  // fused files: kGate is gate_up

struct PlannedTensor {
  LayerPart part;
  Projection projection = Projection::kGate;
  TensorKind kind = TensorKind::kWeight;
  std::int64_t expert = 0;  // kExpert: 0 for a stacked tensor, which holds all
  std::string name;
  Shape shape;
  DTypeSet dtypes;
  bool leading_one_allowed = false;  // [1, n] is as good as [n]
  std::vector<Shape> also = {};      // other shapes that are as good
  bool any_shape = false;
  bool optional = false;
  bool unused = false;  // may be there and is never read
  quant::GgufType block_type = quant::GgufType::kNone;
  bool of_all_experts = false;  // one tensor for all, although each has weights of its own
};

// Router, shared expert, then the experts in order. O(E).
std::vector<PlannedTensor> plan_layer(const LayerSource& source);

}  // namespace moesaic::checkpoint
