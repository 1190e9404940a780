#include "checkpoint/binding/layer_plan.h"

#include <fmt/format.h>

#include "checkpoint/binding/stacked_tensors.h"
#include "checkpoint/config/stored_formats.h"
#include "core/checked.h"
#include "quant/mx.h"

namespace moesaic::checkpoint {
namespace {

// Types that widen to F32 without loss.
constexpr DTypeSet kSmallTypes = {DType::kBF16, DType::kF16, DType::kF32};
constexpr DTypeSet kScaleTypes = {DType::kF32, DType::kBF16, DType::kF8E8M0};

class Planner {
 public:
  explicit Planner(const LayerSource& source) : source_(source), spec_(source.spec) {}

  std::vector<PlannedTensor> run() {
    const Family& family = *source_.family;
    const std::int64_t columns = spec_.num_experts + spec_.routing.num_zero_experts;
    router(LayerPart::kGateWeight, source_.gate_weight, {columns, spec_.hidden_size});
    if (spec_.has_router_bias) router(LayerPart::kGateBias, family.gate_bias, {columns});
    if (spec_.routing.has_correction_bias) {
      router(LayerPart::kCorrectionBias, source_.correction_bias, {columns});
    }
    if (spec_.routing.method == RoutingMethod::kHash) {
      router(LayerPart::kHashTable, family.hash_table,
             {spec_.hash_vocabulary, spec_.routing.top_k});
      tensors_.back().dtypes = {DType::kI64, DType::kI32};
    }
    if (family.input_norm.present()) {
      router(LayerPart::kRouterScale, family.input_norm.router_scale, {spec_.hidden_size});
      router(LayerPart::kExpertsNorm, family.input_norm.experts_weight, {spec_.hidden_size});
      router(LayerPart::kExpertScale, family.input_norm.expert_scale, {columns});
    }
    if (spec_.shared.intermediate_size > 0) shared();
    if (is_per_expert(source_.layout->storage)) {
      for (std::int64_t e = 0; e < spec_.num_experts; ++e) per_expert(e);
      if (source_.scales_stacked) stacked_scales();
      for (std::int64_t e = spec_.num_experts; e < columns; ++e) zero_expert(e);
    } else {
      stacked();
    }
    return std::move(tensors_);
  }

 private:
  std::string full(std::string_view name) const { return fmt::format("{}.{}", spec_.prefix, name); }

  void router(LayerPart part, std::string_view name, const Shape& shape) {
    tensors_.push_back({part, Projection::kGate, TensorKind::kWeight, 0,
                        source_.router_tensor(name), shape, kSmallTypes});
    // ERNIE keeps its selection bias as a matrix with one row.
    tensors_.back().leading_one_allowed = part == LayerPart::kCorrectionBias;
  }

  // One linear of a shared or routed expert, [rows, cols] or with leading E, and its scale.
  void linear(LayerPart part, Projection projection, std::int64_t expert, const std::string& module,
              std::string_view weight_suffix, std::string_view scale_suffix, const Shape& shape) {
    const bool is_shared = part == LayerPart::kShared;
    const LinearFormat& format = is_shared ? source_.shared : source_.experts;
    if (format.stored == StoredFormat::kMxfp4) return mxfp4(projection, module, shape);
    if (format.stored == StoredFormat::kGguf) {
      return gguf(part, projection, expert, format, module + std::string(weight_suffix), shape);
    }
    if (stored_format_row(format.stored).tensors != nullptr) {
      return quantized(part, projection, expert, format, module, shape);
    }
    const DType dtype = is_shared ? source_.shared_dtype : source_.experts_dtype;
    const bool mixed = is_shared ? source_.shared_mixed : source_.experts_mixed;
    tensors_.push_back({part, projection, TensorKind::kWeight, expert,
                        fmt::format("{}{}", module, weight_suffix), shape,
                        mixed ? kSmallTypes : DTypeSet{dtype}});
    if (format.stored != StoredFormat::kFp8Block || (!is_shared && source_.scales_stacked)) return;
    if (format.names != NameStyle::kFp8) {
      scale_suffix = weight_suffix.empty() ? "_weight_scale" : ".weight_scale";
    }
    const int r = shape.rank();
    const Shape of_one = fp8_scale_grid(format, shape[r - 2], shape[r - 1]);
    const Shape grid = r == 2 ? of_one : Shape{shape[0], of_one[0], of_one[1]};
    tensors_.push_back({part, projection, TensorKind::kScale, expert,
                        fmt::format("{}{}", module, scale_suffix), grid, kScaleTypes});
    // ModelOpt keeps the blocks' own axes.
    if (grid.rank() == 2) tensors_.back().also = {Shape{grid[0], 1, grid[1], 1}};
  }

  // The tensors of formats that are stored linear by linear, or stacked in the same way.
  void quantized(LayerPart part, Projection projection, std::int64_t expert,
                 const LinearFormat& format, const std::string& module, const Shape& shape) {
    const std::vector<LinearTensor> list = shape.rank() == 2
                                               ? linear_tensors(format, shape[0], shape[1])
                                               : stacked_linear(projection, format, shape);
    for (const LinearTensor& tensor : list) {
      const bool elsewhere = part == LayerPart::kExpert && source_.scales_stacked;
      if (elsewhere && tensor.kind != TensorKind::kWeight) continue;
      if (tensor.kind == TensorKind::kZeroBias && spec_.has_expert_bias) continue;  // not zeros
      PlannedTensor planned{part,
                            projection,
                            tensor.kind,
                            expert,
                            fmt::format("{}{}", module, tensor.suffix),
                            tensor.shapes.empty() ? Shape{} : tensor.shapes.front(),
                            DTypeSet(tensor.dtypes)};
      planned.also = tensor.shapes;
      planned.any_shape = tensor.shapes.empty();
      planned.optional = tensor.optional;
      tensors_.push_back(std::move(planned));
    }
  }

  std::vector<LinearTensor> stacked_linear(Projection projection, const LinearFormat& format,
                                           const Shape& shape) const {
    const ExpertStorage storage = source_.layout->storage;
    const bool transposed = is_columnwise(storage);
    return stacked_tensors(format, storage, source_.weight_suffix, shape[0],
                           transposed ? shape[2] : shape[1], transposed ? shape[1] : shape[2],
                           is_fused(storage) && projection == Projection::kGate);
  }

  // Blocks of a GGUF file: rows of bytes.
  void gguf(LayerPart part, Projection projection, std::int64_t expert, const LinearFormat& format,
            std::string name, const Shape& shape) {
    const quant::GgufType type = format.blocks[static_cast<std::size_t>(projection)];
    const GgmlTypeInfo info = ggml_type_info(type);
    const std::int64_t row = shape[shape.rank() - 1] / info.block_elements * info.block_bytes;
    PlannedTensor planned{part,
                          projection,
                          TensorKind::kWeight,
                          expert,
                          std::move(name),
                          shape.rank() == 3 ? Shape{shape[0], shape[1], row} : Shape{shape[0], row},
                          {DType::kU8}};
    planned.block_type = type;
    tensors_.push_back(std::move(planned));
    // Beside NVFP4 blocks the converter keeps the second level, and scales of activations that are
    // not quantised here.
    const std::string module = tensors_.back().name.substr(0, tensors_.back().name.rfind('.'));
    const Shape numbers = shape.rank() == 3 ? Shape{shape[0]} : Shape{1};
    const std::string expert_scale = full(source_.family->input_norm.expert_scale);
    for (const std::string_view suffix : {".scale", ".input_scale"}) {
      if (module + std::string(suffix) == expert_scale) continue;  // Gemma 4: on routing weights
      tensors_.push_back({part, projection, TensorKind::kGlobalScale, expert,
                          module + std::string(suffix), numbers, DTypeSet{DType::kF32}});
      tensors_.back().optional = true;
      tensors_.back().unused = suffix == ".input_scale";
    }
  }

  // Blocks of 32 weights in 16 bytes, and a scale each.
  void mxfp4(Projection projection, const std::string& module, const Shape& shape) {
    const std::int64_t groups = shape[2] / quant::kMxGroupSize;
    const auto add = [&](TensorKind kind, std::string_view suffix, const Shape& stored) {
      tensors_.push_back({LayerPart::kExpert,
                          projection,
                          kind,
                          0,
                          fmt::format("{}{}", module, suffix),
                          stored,
                          {DType::kU8}});
    };
    add(TensorKind::kWeight, source_.weight_suffix,
        {shape[0], shape[1], groups, quant::kMxGroupSize / 2});
    add(TensorKind::kScale, source_.layout->scale_suffix, {shape[0], shape[1], groups});
  }

  void shared() {
    const std::int64_t h = spec_.hidden_size;
    const std::int64_t s = spec_.shared.intermediate_size;
    const ExpertLayout& layout = *source_.shared_layout;
    const std::string_view scale =
        is_per_expert(layout.storage) ? layout.scale_suffix : ".weight_scale_inv";
    const auto one = [&](Projection projection, std::string_view module, const Shape& shape) {
      if (module.empty()) return;
      linear(LayerPart::kShared, projection, 0, source_.shared_module(module), ".weight", scale,
             shape);
    };
    one(Projection::kGate, layout.gate, {is_fused(layout.storage) ? 2 * s : s, h});
    one(Projection::kUp, layout.up, {s, h});
    one(Projection::kDown, layout.down, {h, s});
    if (spec_.shared.gated_output) {
      // GGUF writers drop axes of one.
      const bool gguf = source_.layout->block.empty();
      router(LayerPart::kSharedGate, source_.family->shared_gate, gguf ? Shape{h} : Shape{1, h});
      tensors_.back().leading_one_allowed = gguf;
    }
  }

  void expert_linear(Projection projection, std::int64_t expert, std::string_view pattern,
                     const Shape& shape) {
    if (pattern.empty()) return;
    linear(LayerPart::kExpert, projection, expert, full(expand_expert(pattern, expert)),
           source_.weight_suffix, source_.layout->scale_suffix, shape);
  }

  void per_expert(std::int64_t e) {
    const ExpertLayout& layout = *source_.layout;
    const std::int64_t h = spec_.hidden_size;
    const std::int64_t i = spec_.intermediate_size;
    expert_linear(Projection::kGate, e, layout.gate, {is_fused(layout.storage) ? 2 * i : i, h});
    expert_linear(Projection::kUp, e, layout.up, {i, h});
    expert_linear(Projection::kDown, e, layout.down, {h, i});
    if (!spec_.has_expert_bias) return;
    if (!layout.gate.empty()) bias(Projection::kGate, e, layout.gate, {i});
    if (!layout.up.empty()) bias(Projection::kUp, e, layout.up, {i});
    bias(Projection::kDown, e, layout.down, {h});
  }

  // FP8 scales of all experts under the names of fused weights: blocks [E, 2I / n, H / k] and
  // [E, H / n, I / k], or numbers; and one activation scale per expert.
  void stacked_scales() {
    const std::int64_t experts = spec_.num_experts;
    const auto one = [&](Projection projection, std::string_view module, const Shape& grid,
                         bool gate_up) {
      const auto add = [&](TensorKind kind, std::string_view suffix, std::vector<Shape> shapes) {
        tensors_.push_back({LayerPart::kExpert, projection, kind, 0,
                            full(fmt::format("{}{}", module, suffix)), shapes.front(),
                            kScaleTypes});
        tensors_.back().also = std::move(shapes);
        tensors_.back().of_all_experts = true;
      };
      const bool blocks = source_.experts.stored == StoredFormat::kFp8Block;
      add(TensorKind::kScale, "_scale_inv",
          blocks ? std::vector{Shape{experts, (gate_up ? 2 : 1) * grid[0], grid[1]}}
                 : numbers_of_experts(experts, gate_up));
      if (source_.experts.activation == ActivationQuant::kStatic) {
        add(TensorKind::kInputScale, "_activation_scale", numbers_of_experts(experts, false));
      }
    };
    const std::int64_t h = spec_.hidden_size, i = spec_.intermediate_size;
    one(Projection::kGate, kStackedGateUp, fp8_scale_grid(source_.experts, i, h), true);
    one(Projection::kDown, kStackedDown, fp8_scale_grid(source_.experts, h, i), false);
  }

  // LongCat's identity experts have rows in transformers' fused gate_up_proj, which nothing reads;
  // saved one by one they are experts of their own without a down projection.
  void zero_expert(std::int64_t e) {
    const ExpertLayout& layout = *source_.layout;
    const Shape shape = {spec_.intermediate_size, spec_.hidden_size};
    for (const std::string_view module : {layout.gate, layout.up}) {
      tensors_.push_back({LayerPart::kExpert, Projection::kGate, TensorKind::kWeight, e,
                          full(expand_expert(module, e)) + std::string(source_.weight_suffix),
                          shape, kSmallTypes});
      tensors_.back().optional = tensors_.back().unused = true;
    }
  }

  void stacked() {
    const ExpertLayout& layout = *source_.layout;
    const std::int64_t experts = spec_.num_experts;
    const std::int64_t h = spec_.hidden_size;
    const std::int64_t i = spec_.intermediate_size;
    Shape gate, down;
    switch (layout.storage) {
      case ExpertStorage::kPerExpert:
      case ExpertStorage::kPerExpertUpFirst:
      case ExpertStorage::kStacked:
        gate = {experts, i, h}, down = {experts, h, i};
        break;
      case ExpertStorage::kFlat:
        gate = {experts * i, h}, down = {experts * i, h};
        break;
      case ExpertStorage::kFusedNT:
      case ExpertStorage::kFusedNTInterleaved:
      case ExpertStorage::kMxfp4Interleaved:
        gate = {experts, 2 * i, h}, down = {experts, h, i};
        break;
      case ExpertStorage::kFusedNN:
      case ExpertStorage::kFusedNNInterleaved:
        gate = {experts, h, 2 * i}, down = {experts, i, h};
        break;
    }
    expert_linear(Projection::kGate, 0, layout.gate, gate);
    if (spec_.routing.num_zero_experts > 0 && source_.experts.stored == StoredFormat::kPlain) {
      // See zero_expert.
      tensors_.back().also = {Shape{gate[0] + spec_.routing.num_zero_experts, gate[1], gate[2]}};
    }
    expert_linear(Projection::kUp, 0, layout.up, gate);
    expert_linear(Projection::kDown, 0, layout.down, down);
    if (!spec_.has_expert_bias) return;
    const bool together = is_fused(layout.storage);
    if (!layout.gate.empty()) {
      bias(Projection::kGate, 0, layout.gate, {experts, together ? 2 * i : i});
    }
    if (!together) bias(Projection::kUp, 0, layout.up, {experts, i});
    bias(Projection::kDown, 0, layout.down, {experts, h});
  }

  void bias(Projection projection, std::int64_t expert, std::string_view module,
            const Shape& shape) {
    tensors_.push_back(
        {LayerPart::kExpert, projection, TensorKind::kBias, expert,
         full(fmt::format("{}{}", expand_expert(module, expert), source_.layout->bias_suffix)),
         shape, kSmallTypes});
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

std::string LayerSource::beside(std::string_view name) const {
  std::string_view base = spec.prefix;
  base.remove_suffix(layout->block.size() + 1);
  return fmt::format("{}.{}", base, name);
}

std::string LayerSource::router_tensor(std::string_view name) const {
  return family->router_beside_block ? beside(name) : fmt::format("{}.{}", spec.prefix, name);
}

std::string LayerSource::shared_module(std::string_view module) const {
  return family->shared_beside_block ? beside(module) : fmt::format("{}.{}", spec.prefix, module);
}

std::string LayerSource::experts_module() const {
  constexpr std::string_view kExperts = "experts";
  return layout->block == kExperts ? spec.prefix : fmt::format("{}.{}", spec.prefix, kExperts);
}

std::vector<PlannedTensor> plan_layer(const LayerSource& source) { return Planner(source).run(); }

}  // namespace moesaic::checkpoint
