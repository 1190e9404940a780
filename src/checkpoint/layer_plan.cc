#include "checkpoint/layer_plan.h"

#include <fmt/format.h>

#include "core/checked.h"

namespace moesaic {
namespace {

// Types that widen to F32 without loss.
constexpr DTypeSet kSmallTypes = {DType::kBF16, DType::kF16, DType::kF32};
constexpr DTypeSet kScaleTypes = {DType::kF32, DType::kBF16};

class Planner {
 public:
  explicit Planner(const LayerSource& source) : source_(source), spec_(source.spec) {}

  std::vector<PlannedTensor> run() {
    const Family& family = *source_.family;
    const std::int64_t columns = spec_.num_experts + spec_.routing.num_zero_experts;
    router(LayerPart::kGateWeight, family.gate_weight, {columns, spec_.hidden_size});
    if (spec_.has_router_bias) router(LayerPart::kGateBias, family.gate_bias, {columns});
    if (spec_.routing.has_correction_bias) {
      router(LayerPart::kCorrectionBias, source_.correction_bias, {columns});
    }
    if (spec_.shared.intermediate_size > 0) shared();
    if (source_.layout->storage == ExpertStorage::kPerExpert) {
      for (std::int64_t e = 0; e < spec_.num_experts; ++e) per_expert(e);
    } else {
      fused();
    }
    return std::move(tensors_);
  }

 private:
  std::string full(std::string_view name) const { return fmt::format("{}.{}", spec_.prefix, name); }

  void router(LayerPart part, std::string_view name, const Shape& shape) {
    tensors_.push_back(
        {part, Projection::kGate, TensorKind::kWeight, 0, full(name), shape, kSmallTypes});
  }

  // One linear of a shared or routed expert, [rows, cols] or with leading E, and its scale.
  void linear(LayerPart part, Projection projection, std::int64_t expert, const std::string& module,
              std::string_view weight_suffix, std::string_view scale_suffix, const Shape& shape) {
    const bool is_shared = part == LayerPart::kShared;
    const DType dtype = is_shared ? source_.shared_dtype : source_.experts_dtype;
    const StoredFormat format = is_shared ? source_.shared_format : source_.experts_format;
    tensors_.push_back({part,
                        projection,
                        TensorKind::kWeight,
                        expert,
                        fmt::format("{}{}", module, weight_suffix),
                        shape,
                        {dtype}});
    if (format != StoredFormat::kFp8Block) return;
    const Shape grid = shape.rank() == 2
                           ? Shape{scale_blocks(shape[0]), scale_blocks(shape[1])}
                           : Shape{shape[0], scale_blocks(shape[1]), scale_blocks(shape[2])};
    tensors_.push_back({part, projection, TensorKind::kScale, expert,
                        fmt::format("{}{}", module, scale_suffix), grid, kScaleTypes});
  }

  void shared() {
    const std::int64_t h = spec_.hidden_size;
    const std::int64_t s = spec_.shared.intermediate_size;
    const auto one = [&](Projection projection, std::string_view leaf, const Shape& shape) {
      linear(LayerPart::kShared, projection, 0,
             full(fmt::format("{}.{}", source_.family->shared_module, leaf)), ".weight",
             ".weight_scale_inv", shape);
    };
    one(Projection::kGate, "gate_proj", {s, h});
    one(Projection::kUp, "up_proj", {s, h});
    one(Projection::kDown, "down_proj", {h, s});
    if (spec_.shared.gated_output) {
      router(LayerPart::kSharedGate, source_.family->shared_gate, {1, h});
    }
  }

  void expert_linear(Projection projection, std::int64_t expert, std::string_view pattern,
                     const Shape& shape) {
    linear(LayerPart::kExpert, projection, expert, full(expand_expert(pattern, expert)),
           source_.weight_suffix, source_.layout->scale_suffix, shape);
  }

  void per_expert(std::int64_t e) {
    const ExpertLayout& layout = *source_.layout;
    const std::int64_t h = spec_.hidden_size;
    const std::int64_t i = spec_.intermediate_size;
    expert_linear(Projection::kGate, e, layout.gate, {i, h});
    expert_linear(Projection::kUp, e, layout.up, {i, h});
    expert_linear(Projection::kDown, e, layout.down, {h, i});
  }

  void fused() {
    const ExpertLayout& layout = *source_.layout;
    const std::int64_t experts = spec_.num_experts;
    const std::int64_t h = spec_.hidden_size;
    const std::int64_t i = spec_.intermediate_size;
    const bool nt = layout.storage == ExpertStorage::kFusedNT;
    expert_linear(Projection::kGate, 0, layout.gate,
                  nt ? Shape{experts, 2 * i, h} : Shape{experts, h, 2 * i});
    expert_linear(Projection::kDown, 0, layout.down,
                  nt ? Shape{experts, h, i} : Shape{experts, i, h});
    if (!spec_.has_expert_bias) return;
    bias(Projection::kGate, layout.gate, {experts, 2 * i});
    bias(Projection::kDown, layout.down, {experts, h});
  }

  void bias(Projection projection, std::string_view module, const Shape& shape) {
    tensors_.push_back({LayerPart::kExpert, projection, TensorKind::kBias, 0,
                        full(fmt::format("{}{}", module, source_.layout->bias_suffix)), shape,
                        kSmallTypes});
  }

  const LayerSource& source_;
  const MoeLayerSpec& spec_;
  std::vector<PlannedTensor> tensors_;
};

}  // namespace

std::string DTypeSet::to_string() const {
  std::vector<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(DType::kU64); ++i) {
    if (contains(static_cast<DType>(i))) names.push_back(dtype_name(static_cast<DType>(i)));
  }
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += names[i];
  }
  return text;
}

std::vector<PlannedTensor> plan_layer(const LayerSource& source) { return Planner(source).run(); }

std::int64_t scale_blocks(std::int64_t size) { return ceil_div(size, kFp8BlockSize); }

}  // namespace moesaic
