#include "checkpoint/convert/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <iterator>
#include <set>

#include "checkpoint/container/names.h"
#include "quant/block_scales.h"
#include "quant/mx.h"

namespace moesaic::checkpoint {
namespace {

// A file of copied tensors is closed at about this size; what other exporters write, too.
constexpr std::uint64_t kCopyShardBytes = 4'000'000'000;

// "<before>{e}<after>" + a suffix that begins with '.' or '_', or nothing.
bool belongs_to(std::string_view pattern, std::string_view name) {
  const std::size_t brace = pattern.find("{e}");
  const std::string_view before = pattern.substr(0, brace);
  if (!name.starts_with(before)) return false;
  name.remove_prefix(before.size());
  if (brace != std::string_view::npos) {
    const auto digits = static_cast<std::size_t>(
        std::find_if_not(name.begin(), name.end(),
                         [](unsigned char c) { return std::isdigit(c) != 0; }) -
        name.begin());
    if (digits == 0) return false;
    name.remove_prefix(digits);
    const std::string_view after = pattern.substr(brace + 3);
    if (!name.starts_with(after)) return false;
    name.remove_prefix(after.size());
  }
  return name.empty() || name.front() == '.' || name.front() == '_';
}

// Block of a layer relative to its layer: "mlp" of "model.layers.3.mlp", nothing of "layers.3".
bool in_block(const MoeLayerSpec& spec, const ExpertLayout& layout) {
  const std::string last =
      layout.block.empty() ? std::to_string(spec.layer) : std::string(layout.block);
  return layout.present() && spec.prefix.ends_with("." + last);
}

Result<PlannedLayer> plan_layer_target(const MoeLayerSpec& spec, const Family& family,
                                       ConvertFormat format) {
  PlannedLayer planned;
  planned.spec = spec;
  const auto full = [&](std::string_view module) {
    return module.empty() ? std::string() : fmt::format("{}.{}", spec.prefix, module);
  };
  for (const ExpertLayout& layout : family.layouts) {
    if (!in_block(spec, layout)) continue;
    const bool own =
        layout.storage == ExpertStorage::kMxfp4Interleaved && format == ConvertFormat::kMxfp4;
    if (!own && (layout.storage != ExpertStorage::kPerExpert || layout.of_quantisers)) continue;
    planned.own_mxfp4 = own;
    planned.gated = !layout.gate.empty();
    planned.gate = full(layout.gate);
    planned.up = full(layout.up);
    planned.down = full(layout.down);
    if (own || !spec.has_expert_bias) return planned;
  }
  if (!planned.down.empty() && !spec.has_expert_bias) return planned;
  // As transformers holds them, and as files are that were saved like that: beside the names of files.
  const auto own =
      std::find_if(family.layouts.begin(), family.layouts.end(), [&](const ExpertLayout& layout) {
        return layout.present() && layout.storage == ExpertStorage::kPerExpert &&
               !layout.of_quantisers && !in_block(spec, layout);
      });
  if (own != family.layouts.end()) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("layer {}: its experts lie in stacked tensors under {}, and single "
                    "ones of {} models under {}: need a checkpoint with those",
                    spec.layer, quote_name(spec.prefix), family.title, quote_name(own->block)));
  }
  return Status(
      StatusCode::kUnsupported,
      fmt::format("layer {}: {} models keep their experts in stacked tensors, for which {} "
                  "has no layout that engines agree on{}",
                  spec.layer, family.title, convert_format_name(format),
                  family.layouts[1].storage == ExpertStorage::kMxfp4Interleaved ||
                          family.layouts[0].storage == ExpertStorage::kMxfp4Interleaved
                      ? "; nearest is mxfp4"
                      : ""));
}

void add_linear(const std::string& module, ConvertFormat format, std::int64_t n, std::int64_t k,
                PlannedShard* shard) {
  for (const ConvertedTensor& t : linear_tensors(format, n, k)) {
    shard->tensors.push_back({module + std::string(t.suffix), t.dtype, t.shape});
  }
}

Status check_sizes(const PlannedLayer& layer, ConvertFormat format) {
  const std::int64_t h = layer.spec.hidden_size;
  const std::int64_t i = layer.spec.intermediate_size;
  const std::string where = fmt::format("layer {}: experts", layer.spec.layer);
  MOESAIC_RETURN_IF_ERROR(check_linear(format, where + " gate and up", i, h));
  MOESAIC_RETURN_IF_ERROR(check_linear(format, where + " down", h, i));
  // Readers merge gate and up into one matrix of whole tiles.
  if (is_fp8_block(format) && i % quant::kFp8BlockSize != 0) {
    return {StatusCode::kUnsupported,
            fmt::format("layer {}: got intermediate_size {}, need a multiple of {} for fp8-block",
                        layer.spec.layer, i, quant::kFp8BlockSize)};
  }
  return {};
}

// Outputs of the experts of one layer.
PlannedShard plan_experts(const PlannedLayer& layer, ConvertFormat format) {
  const std::int64_t h = layer.spec.hidden_size;
  const std::int64_t i = layer.spec.intermediate_size;
  const std::int64_t e = layer.spec.num_experts;
  PlannedShard shard;
  if (layer.own_mxfp4) {
    const auto add = [&](const std::string& module, std::int64_t rows, std::int64_t cols) {
      const std::int64_t groups = cols / quant::kMxGroupSize;
      shard.tensors.push_back(
          {module + "_blocks", DType::kU8, {e, rows, groups, quant::kMxGroupSize / 2}});
      shard.tensors.push_back({module + "_scales", DType::kU8, {e, rows, groups}});
    };
    add(layer.gate, 2 * i, h);
    add(layer.down, h, i);
    return shard;
  }
  for (std::int64_t expert = 0; expert < e; ++expert) {
    if (layer.gated) add_linear(module_of_expert(layer.gate, expert), format, i, h, &shard);
    add_linear(module_of_expert(layer.up, expert), format, i, h, &shard);
    add_linear(module_of_expert(layer.down, expert), format, h, i, &shard);
  }
  return shard;
}

// The linear that a tensor of this name is a scale, a code or an index of, which only quantised
// linears have; empty for other names.
std::string_view quantized_linear_of(std::string_view name) {
  constexpr std::array<std::string_view, 24> kSuffixes = {".weight_scale_inv",
                                                          ".weight_scale",
                                                          ".weight_scale_2",
                                                          ".weight_packed",
                                                          ".weight_shape",
                                                          ".weight_global_scale",
                                                          ".weight_zero_point",
                                                          ".weight_g_idx",
                                                          ".weight_format",
                                                          ".weight.absmax",
                                                          ".weight.quant_map",
                                                          ".weight.nested_absmax",
                                                          ".weight.nested_quant_map",
                                                          ".weight.quant_state.bitsandbytes__nf4",
                                                          ".weight.quant_state.bitsandbytes__fp4",
                                                          ".qweight",
                                                          ".qzeros",
                                                          ".scales",
                                                          ".g_idx",
                                                          ".SCB",
                                                          ".input_scale",
                                                          ".input_global_scale",
                                                          ".pre_quant_scale",
                                                          "_scale_inv"};
  for (const std::string_view suffix : kSuffixes) {
    if (name.ends_with(suffix)) return name.substr(0, name.size() - suffix.size());
  }
  return {};
}

constexpr std::string_view kWeight = ".weight";

// Numbers that nothing but a scale makes weights of.
bool is_code(DType dtype) {
  return dtype != DType::kBF16 && dtype != DType::kF16 && dtype != DType::kF32 &&
         dtype != DType::kF64;
}

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, const ShardSet& shards, const SourceQuantization& source,
          ConvertFormat format)
      : checkpoint_(checkpoint), shards_(shards), source_(source) {
    plan_.format = format;
  }

  Result<ConvertPlan> run() {
    const Family* family = find_family(checkpoint_.model_type());
    if (family == nullptr || checkpoint_.layers().empty()) {
      return Status(StatusCode::kUnsupported,
                    "convert: the checkpoint has no MoE layer that this version knows");
    }
    for (const MoeLayerSpec& spec : checkpoint_.layers()) {
      MOESAIC_ASSIGN_OR_RETURN(PlannedLayer layer, plan_layer_target(spec, *family, plan_.format));
      MOESAIC_RETURN_IF_ERROR(check_sizes(layer, plan_.format));
      for (const ExpertLayout& layout : family->layouts) {
        if (!in_block(spec, layout)) continue;
        for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
          if (!module.empty()) expert_patterns_.push_back({spec.prefix + ".", module});
        }
      }
      plan_.layers.push_back(std::move(layer));
    }
    MOESAIC_RETURN_IF_ERROR(plan_copies());
    MOESAIC_RETURN_IF_ERROR(describe());
    for (std::size_t i = 0; i < plan_.layers.size(); ++i) {
      PlannedShard shard = plan_experts(plan_.layers[i], plan_.format);
      shard.layer = static_cast<int>(i);
      for (const TensorSpec& t : shard.tensors) {
        MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(t.dtype, t.shape));
        plan_.layers[i].bytes_out += bytes;
      }
      plan_.shards.push_back(std::move(shard));
    }
    for (std::size_t i = 0; i < plan_.shards.size(); ++i) {
      plan_.shards[i].file =
          fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, plan_.shards.size());
    }
    return std::move(plan_);
  }

 private:
  // Index of the layer whose routed experts the tensor belongs to, or -1. Biases of gpt-oss's
  // experts stay what they are.
  int layer_of(std::string_view name) const {
    for (std::size_t i = 0; i < plan_.layers.size(); ++i) {
      const std::string prefix = plan_.layers[i].spec.prefix + ".";
      if (!name.starts_with(prefix)) continue;
      if (plan_.layers[i].own_mxfp4 && name.ends_with("_bias")) return -1;
      for (const auto& [block, module] : expert_patterns_) {
        if (block == prefix && belongs_to(module, name.substr(prefix.size()))) {
          return static_cast<int>(i);
        }
      }
    }
    return -1;
  }

  Status plan_copies() {
    std::set<std::string, std::less<>> weights, quantized;  // linears
    for (const ShardSet::Located& t : shards_.tensors()) {
      const std::string& name = t.info->name;
      const int layer = layer_of(name);
      if (layer >= 0) {
        PlannedLayer& planned = plan_.layers[static_cast<std::size_t>(layer)];
        if (planned.own_mxfp4 && name.ends_with(".bias")) {
          return {StatusCode::kUnsupported,
                  fmt::format("convert: {}: a bias of one expert is not supported, need those of "
                              "all experts in one tensor",
                              quote_name(name))};
        }
        planned.bytes_in += static_cast<std::int64_t>(t.info->bytes());
        continue;
      }
      if (t.info->rank > kMaxRank) {
        return {StatusCode::kUnsupported, fmt::format("convert: {}: got rank {}, need at most {}",
                                                      quote_name(name), t.info->rank, kMaxRank)};
      }
      add_copy(t);
      const std::string_view linear = quantized_linear_of(name);
      if (!linear.empty()) quantized.emplace(linear);
      modules_.kv_scales |= name.ends_with(".k_scale") || name.ends_with(".v_scale");
      if (!name.ends_with(kWeight)) continue;
      const std::string module = name.substr(0, name.size() - kWeight.size());
      if (is_code(t.info->dtype)) {
        quantized.insert(module);
      } else if (t.info->rank == 2) {
        weights.insert(module);
      }
    }
    std::set_difference(weights.begin(), weights.end(), quantized.begin(), quantized.end(),
                        std::back_inserter(modules_.plain));
    modules_.quantized.assign(quantized.begin(), quantized.end());
    return {};
  }

  Status describe() {
    modules_.format = plan_.format;
    for (const PlannedLayer& layer : plan_.layers) {
      modules_.own_mxfp4 = modules_.own_mxfp4 || layer.own_mxfp4;
      const DType stored = layer.spec.quant.weight.dtype;
      modules_.experts.push_back(
          {layer.spec.layer, layer.spec.prefix + ".experts", !is_code(stored)});
    }
    MOESAIC_ASSIGN_OR_RETURN(ConvertedQuantization made, describe_conversion(source_, modules_));
    plan_.format = made.format;
    plan_.quantization = std::move(made.json);
    plan_.notes = std::move(made.notes);
    return {};
  }

  void add_copy(const ShardSet::Located& tensor) {
    const TensorInfo& info = *tensor.info;
    if (plan_.shards.empty() || (copy_bytes_ > 0 && copy_bytes_ + info.bytes() > kCopyShardBytes)) {
      plan_.shards.emplace_back();
      copy_bytes_ = 0;
    }
    copy_bytes_ += info.bytes();
    PlannedShard& shard = plan_.shards.back();
    shard.tensors.push_back({info.name, info.dtype, info.shape});
    shard.copies.push_back(tensor);
  }

  const Checkpoint& checkpoint_;
  const ShardSet& shards_;
  const SourceQuantization& source_;
  ConvertPlan plan_;
  ConvertedModules modules_;
  std::vector<std::pair<std::string, std::string_view>> expert_patterns_;  // block, module
  std::uint64_t copy_bytes_ = 0;
};

}  // namespace

std::string module_of_expert(const std::string& pattern, std::int64_t expert) {
  return expand_expert(pattern, expert);
}

Result<ConvertPlan> plan_conversion(const Checkpoint& checkpoint, const ShardSet& shards,
                                    const SourceQuantization& source, ConvertFormat format) {
  return Planner(checkpoint, shards, source, format).run();
}

}  // namespace moesaic::checkpoint
