#include "layer/convert_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <set>

#include "checkpoint/names.h"
#include "quant/mx.h"

namespace moesaic {
namespace {

// A file of copied tensors is closed at about this size; what other exporters write, too.
constexpr std::uint64_t kCopyShardBytes = 4'000'000'000;
constexpr std::string_view kScaleInv = "_scale_inv";

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

// Block of a layer relative to its layer: "mlp" of "model.layers.3.mlp".
bool in_block(const MoeLayerSpec& spec, const ExpertLayout& layout) {
  return layout.present() && spec.prefix.ends_with(std::string(1, '.').append(layout.block));
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
    if (!own && layout.storage != ExpertStorage::kPerExpert) continue;
    planned.own_mxfp4 = own;
    planned.gated = !layout.gate.empty();
    planned.gate = full(layout.gate);
    planned.up = full(layout.up);
    planned.down = full(layout.down);
    if (own || !spec.has_expert_bias) return planned;
  }
  if (!planned.down.empty() && !spec.has_expert_bias) return planned;
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
  if (format == ConvertFormat::kFp8Block && i % 128 != 0) {
    return {StatusCode::kUnsupported,
            fmt::format("layer {}: got intermediate_size {}, need a multiple of 128 for fp8-block",
                        layer.spec.layer, i)};
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
      const std::int64_t groups = cols / kMxGroupSize;
      shard.tensors.push_back(
          {module + "_blocks", DType::kU8, {e, rows, groups, kMxGroupSize / 2}});
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

// Suffixes of tensors that only quantised linears have.
bool is_quantisation_detail(std::string_view name) {
  constexpr std::array<std::string_view, 14> kSuffixes = {".weight_scale",
                                                          ".weight_packed",
                                                          ".weight_scale_2",
                                                          ".weight_global_scale",
                                                          ".qweight",
                                                          ".qzeros",
                                                          ".g_idx",
                                                          ".input_scale",
                                                          ".scales",
                                                          ".weight_zero_point",
                                                          ".input_global_scale",
                                                          ".SCB",
                                                          ".weight.absmax",
                                                          ".weight_scale_inv"};
  return std::any_of(kSuffixes.begin(), kSuffixes.end(),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, const ShardSet& shards, ConvertFormat format)
      : checkpoint_(checkpoint), shards_(shards) {
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
    // A model stored as FP8 blocks keeps its other linears when the result is FP8 blocks as well.
    const bool to_fp8 = plan_.format == ConvertFormat::kFp8Block;
    std::set<std::string, std::less<>> consumed;  // scales that go into BF16 weights
    std::vector<CopiedTensor> copies;
    std::size_t decoded = 0;
    for (const ShardSet::Located& t : shards_.tensors()) {
      const std::string& name = t.info->name;
      const int layer = layer_of(name);
      if (layer >= 0) {
        plan_.layers[static_cast<std::size_t>(layer)].bytes_in +=
            static_cast<std::int64_t>(t.info->bytes());
        continue;
      }
      CopiedTensor copy{t};
      const auto scale = shards_.find(name + std::string(kScaleInv));
      if (scale && t.info->dtype == DType::kF8E4M3) {
        if (to_fp8) {
          plan_.keep_quantization_config = true;
        } else {
          copy.scale = scale->info;
          copy.scale_file = scale->file;
          consumed.insert(scale->info->name);
          ++decoded;
        }
      }
      copies.push_back(copy);
    }
    std::erase_if(copies, [&](const CopiedTensor& c) {
      return consumed.find(c.from.info->name) != consumed.end();
    });
    if (decoded > 0) {
      plan_.notes.push_back(
          fmt::format("{} FP8-block linears outside the routed experts became BF16", decoded));
    }
    for (const CopiedTensor& copy : copies) {
      const TensorInfo& info = *copy.from.info;
      const bool kept = plan_.keep_quantization_config && info.name.ends_with(kScaleInv);
      if (is_quantisation_detail(info.name) && !kept) {
        return {StatusCode::kUnsupported,
                fmt::format("convert: {} belongs to a quantised linear outside the routed experts, "
                            "which the new configuration could not describe",
                            quote_name(info.name))};
      }
      add_copy(copy);
    }
    return {};
  }

  void add_copy(const CopiedTensor& copy) {
    const TensorInfo& info = *copy.from.info;
    const std::uint64_t bytes = copy.scale != nullptr ? 2 * info.bytes() : info.bytes();
    if (plan_.shards.empty() || (copy_bytes_ > 0 && copy_bytes_ + bytes > kCopyShardBytes)) {
      plan_.shards.emplace_back();
      copy_bytes_ = 0;
    }
    copy_bytes_ += bytes;
    PlannedShard& shard = plan_.shards.back();
    shard.tensors.push_back(
        {info.name, copy.scale != nullptr ? DType::kBF16 : info.dtype, info.shape});
    shard.copies.push_back(copy);
    constexpr std::string_view kWeight = ".weight";
    if (info.rank == 2 && info.name.ends_with(kWeight)) {
      plan_.ignored.push_back(info.name.substr(0, info.name.size() - kWeight.size()));
    }
  }

  const Checkpoint& checkpoint_;
  const ShardSet& shards_;
  ConvertPlan plan_;
  std::vector<std::pair<std::string, std::string_view>> expert_patterns_;  // block, module
  std::uint64_t copy_bytes_ = 0;
};

}  // namespace

std::string module_of_expert(const std::string& pattern, std::int64_t expert) {
  return expand_expert(pattern, expert);
}

Result<ConvertPlan> plan_conversion(const Checkpoint& checkpoint, const ShardSet& shards,
                                    ConvertFormat format) {
  return Planner(checkpoint, shards, format).run();
}

}  // namespace moesaic
