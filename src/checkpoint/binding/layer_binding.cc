#include "checkpoint/binding/layer_binding.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/binding/layer_choices.h"
#include "checkpoint/config/gguf_config.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::size_t kNamesShown = 8;

// Quoted names, comma separated, at most kNamesShown.
std::string list_names(const std::vector<std::string_view>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) {
    if (i > 0) text += ", ";
    text += quote_name(names[i]);
  }
  if (names.size() > kNamesShown) text += fmt::format(" and {} more", names.size() - kNamesShown);
  return text;
}

bool is_layer_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

// Whether a tensor belongs to the block, in files whose blocks share their name with the rest of
// the layer: GGUF and Mistral's own.
bool is_moe_part(std::string_view name) {
  if (name.starts_with(kGgufLayerPrefix)) return is_gguf_moe_tensor(name);
  while (!name.empty()) {  // what follows the number of the layer
    const std::string_view part = name.substr(0, name.find('.'));
    name.remove_prefix(std::min(part.size() + 1, name.size()));
    if (is_layer_number(part)) break;
  }
  return name.starts_with("experts.") || name.starts_with("shared_experts.") ||
         name.starts_with("gate.");
}

Status missing_error(const LayerSource& source, const std::vector<PlannedTensor>& plan,
                     const std::vector<const PlannedTensor*>& missing,
                     const std::vector<std::string_view>& unknown) {
  std::vector<std::string_view> names;
  std::map<std::int64_t, std::int64_t> lacking;  // expert -> tensors not received
  for (const PlannedTensor* tensor : missing) {
    names.push_back(tensor->name);
    if (tensor->part == LayerPart::kExpert) ++lacking[tensor->expert];
  }
  std::string text =
      fmt::format("layer {} ({}): {} of {} tensors are missing: {}", source.spec.layer,
                  source.spec.prefix, missing.size(), plan.size(), list_names(names));
  if (is_per_expert(source.layout->storage) && !lacking.empty()) {
    const std::int64_t per_expert =
        std::count_if(plan.begin(), plan.end(), [](const PlannedTensor& tensor) {
          return tensor.part == LayerPart::kExpert && tensor.expert == 0 && !tensor.optional;
        });
    text +=
        fmt::format("; {} of {} experts are incomplete", lacking.size(), source.spec.num_experts);
    const auto& [expert, count] = *lacking.begin();
    text += fmt::format(" (expert {}: {} of {} received)", expert, per_expert - count, per_expert);
  }
  if (!unknown.empty()) text += "; not recognised: " + list_names(unknown);
  // No expert is there as it should be, but something else is: another way to store them.
  const bool other_storage =
      !unknown.empty() && std::all_of(plan.begin(), plan.end(), [&](const PlannedTensor& tensor) {
        return tensor.part != LayerPart::kExpert || tensor.kind != TensorKind::kWeight ||
               tensor.optional ||
               std::binary_search(missing.begin(), missing.end(), &tensor);  // in the plan's order
      });
  return {other_storage ? StatusCode::kUnsupported : StatusCode::kMissingTensor, std::move(text)};
}

// Whether `name` is a tensor of an expert that the layer does not have, or a second spelling of a
// weight that it has: then the files contradict the configuration or themselves. Other names may
// mean something that this version does not know.
bool contradicts(const LayerSource& source, std::string_view name) {
  const ExpertLayout& layout = *source.layout;
  const std::string inside = source.spec.prefix + ".";
  if (!name.starts_with(inside)) return false;
  name.remove_prefix(inside.size());
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    const std::string_view fixed = module.substr(0, module.find("{e}"));
    if (module.empty() || !name.starts_with(fixed)) continue;
    const std::string_view rest = name.substr(fixed.size());
    if (!is_per_expert(layout.storage)) {
      const auto suffixes = layout.weight_suffixes.list();
      if (std::find(suffixes.begin(), suffixes.end(), rest) != suffixes.end()) return true;
      continue;
    }
    const std::string_view number = rest.substr(0, rest.find('.'));
    const bool digits = !number.empty() && number.find_first_not_of("0123456789") == number.npos;
    const bool ours = number.size() < 10 && (number.size() == 1 || number.front() != '0') &&
                      digits && std::stoll(std::string(number)) < source.spec.num_experts;
    if (digits && !ours) return true;
  }
  return false;
}

Status unknown_error(const LayerSource& source, const std::vector<std::string_view>& unknown) {
  const bool corrupt = std::any_of(unknown.begin(), unknown.end(), [&](std::string_view name) {
    return contradicts(source, name);
  });
  return {corrupt ? StatusCode::kCorruptFile : StatusCode::kUnsupported,
          fmt::format("layer {} ({}): {} tensors in the block are not recognised: {}",
                      source.spec.layer, source.spec.prefix, unknown.size(), list_names(unknown))};
}

// Beginnings of the names in every block the family may use, and in what lies beside it: Mixtral's
// other spelling must not hide a second copy.
std::set<std::string> block_beginnings(const LayerSource& source) {
  std::string_view layer = source.spec.prefix;
  layer.remove_suffix(source.layout->block.size());
  std::set<std::string> blocks;
  for (const ExpertLayout& layout : source.family->layouts) {
    if (layout.present()) blocks.insert(fmt::format("{}{}.", layer, layout.block));
  }
  for (const std::string_view module : modules_beside_block(*source.family)) {
    blocks.insert(fmt::format("{}{}.", layer, module));
  }
  return blocks;
}

// Names inside the layer's blocks that the plan does not have.
std::vector<std::string_view> unknown_names(const LayerSource& source, const ShardSet& shards,
                                            const std::vector<PlannedTensor>& plan) {
  std::set<std::string_view> known;
  for (const PlannedTensor& tensor : plan) known.insert(tensor.name);
  std::vector<std::string_view> unknown;
  for (const std::string& block : block_beginnings(source)) {
    for (const ShardSet::Located& tensor : tensors_under(shards, block)) {
      if (source.layout->block.empty() && !is_moe_part(name_of(tensor))) continue;
      if (known.count(name_of(tensor)) == 0) unknown.push_back(name_of(tensor));
    }
  }
  return unknown;
}

void place(const PlannedTensor& planned, const ShardSet::Located& where, BoundLayer* layer) {
  const auto projection = static_cast<std::size_t>(planned.projection);
  const auto into = [&](MlpTensors* mlp) { mlp->of(planned.kind)[projection] = where; };
  switch (planned.part) {
    case LayerPart::kGateWeight:
      layer->gate_weight = where;
      return;
    case LayerPart::kGateBias:
      layer->gate_bias = where;
      return;
    case LayerPart::kCorrectionBias:
      layer->correction_bias = where;
      return;
    case LayerPart::kHashTable:
      layer->hash_table = where;
      return;
    case LayerPart::kRouterScale:
      layer->router_scale = where;
      return;
    case LayerPart::kExpertsNorm:
      layer->experts_norm = where;
      return;
    case LayerPart::kExpertScale:
      layer->expert_scale = where;
      return;
    case LayerPart::kSharedGate:
      layer->shared_gate = where;
      return;
    case LayerPart::kShared:
      return into(&layer->shared);
    case LayerPart::kExpert:
      return into(&layer->experts[static_cast<std::size_t>(planned.expert)]);
  }
}

// What all experts have in common is part of each; gate and up have one tensor.
void share_scales(std::vector<MlpTensors>* experts) {
  for (const TensorKind kind : {TensorKind::kScale, TensorKind::kInputScale}) {
    MlpTensors::PerProjection shared = experts->front().of(kind);
    shared[static_cast<std::size_t>(Projection::kUp)] =
        shared[static_cast<std::size_t>(Projection::kGate)];
    for (MlpTensors& expert : *experts) expert.of(kind) = shared;
  }
}

}  // namespace

Status check_form(const PlannedTensor& want, const TensorInfo& got) {
  if (!want.dtypes.contains(got.dtype) || want.block_type != got.block_type) {
    const auto block_or = [](quant::GgufType type, const std::string& dtype) {
      return type == quant::GgufType::kNone ? dtype : std::string(ggml_type_info(type).name);
    };
    const bool router_codes = is_gate(want.part) && dtype_bits(got.dtype) <= 8;
    return {StatusCode::kInvalidDType,
            fmt::format("{}: got {}, need {}{}", quote_name(want.name),
                        block_or(got.block_type, std::string(dtype_name(got.dtype))),
                        block_or(want.block_type, want.dtypes.to_string()),
                        router_codes ? " (quantised routers are not supported)" : "")};
  }
  if (want.any_shape && got.rank <= kMaxRank) return {};
  for (const Shape& shape : want.also) {
    if (got.rank == shape.rank() && got.shape == shape) return {};
  }
  if (want.leading_one_allowed && got.rank == 2 && got.shape[0] == 1 && want.shape.rank() == 1 &&
      got.shape[1] == want.shape[0]) {
    return {};
  }
  // Exact: no broadcasting, no [1] for [], no longer tensor whose tail would be dropped.
  if (got.rank != want.shape.rank() || !(got.shape == want.shape)) {
    return {StatusCode::kInvalidShape,
            got.rank > kMaxRank ? fmt::format("{}: got rank {}, need {}", quote_name(want.name),
                                              got.rank, want.shape.to_string())
                                : fmt::format("{}: got {}, need {}", quote_name(want.name),
                                              got.shape.to_string(), want.shape.to_string())};
  }
  return {};
}

bool in_block(const LayerSource& source, std::string_view name) {
  if (source.layout->block.empty() && !is_moe_part(name)) return false;
  const std::set<std::string> blocks = block_beginnings(source);
  return std::any_of(blocks.begin(), blocks.end(),
                     [&](const std::string& block) { return name.starts_with(block); });
}

std::vector<std::string> missing_names(const LayerSource& source, const ShardSet& shards,
                                       const TensorNeeded& needed) {
  std::vector<std::string> names;
  for (const PlannedTensor& planned : plan_layer(source)) {
    if (planned.optional || shards.find(planned.name)) continue;
    if (!needed || needed(source, planned)) names.push_back(planned.name);
  }
  return names;
}

std::int64_t MlpTensors::bytes() const {
  // Sizes were checked against the files, so that the sum of all tensors fits.
  std::uint64_t bytes = 0;
  for (const PerProjection& kind : kinds_) {
    for (const auto& tensor : kind) bytes += tensor ? tensor->info->bytes() : 0;
  }
  return static_cast<std::int64_t>(bytes);
}

std::span<const ShardSet::Located> tensors_under(const ShardSet& shards, std::string_view prefix) {
  const std::span<const ShardSet::Located> all = shards.tensors();
  const auto before = [](const ShardSet::Located& tensor, std::string_view key) {
    return name_of(tensor).substr(0, key.size()) < key;
  };
  const auto after = [](std::string_view key, const ShardSet::Located& tensor) {
    return key < name_of(tensor).substr(0, key.size());
  };
  const auto first = std::lower_bound(all.begin(), all.end(), prefix, before);
  const auto last = std::upper_bound(first, all.end(), prefix, after);
  return all.subspan(static_cast<std::size_t>(first - all.begin()),
                     static_cast<std::size_t>(last - first));
}

std::int64_t stored_block_bytes(const std::string& block, const ShardSet& shards) {
  std::uint64_t bytes = 0;
  const bool bare = is_layer_number(std::string_view{block}.substr(block.rfind('.') + 1));
  for (const ShardSet::Located& tensor : tensors_under(shards, block + ".")) {
    if (bare && !is_moe_part(name_of(tensor))) continue;
    bytes += tensor.info->bytes();  // parts of one file set: their sum fits
  }
  return static_cast<std::int64_t>(bytes);
}

Result<LayerSource> resolve_layer(const ModelConfig& config, const MoeLayerSpec& spec,
                                  const ShardSet& shards) {
  LayerSource source;
  source.spec = spec;
  source.family = config.family;
  MOESAIC_RETURN_IF_ERROR(choose_names(config, shards, &source));
  MOESAIC_RETURN_IF_ERROR(choose_numbers(config, shards, &source));
  return source;
}

Result<BoundLayer> bind_layer(const ModelConfig& config, const MoeLayerSpec& spec,
                              const ShardSet& shards, const TensorNeeded& needed) {
  BoundLayer layer;
  MOESAIC_ASSIGN_OR_RETURN(layer.source, resolve_layer(config, spec, shards));
  const LayerSource& source = layer.source;
  const bool stacked = !is_per_expert(source.layout->storage);
  layer.experts.resize(stacked ? 1 : static_cast<std::size_t>(spec.num_experts));

  const std::vector<PlannedTensor> plan = plan_layer(source);
  std::vector<const PlannedTensor*> missing;
  for (const PlannedTensor& planned : plan) {
    const auto where = shards.find(planned.name);
    if (where) {
      if (!planned.unused) place(planned, *where, &layer);
    } else if (!planned.optional && (!needed || needed(source, planned))) {
      missing.push_back(&planned);
    }
  }
  const std::vector<std::string_view> unknown = unknown_names(source, shards, plan);
  if (!missing.empty()) return missing_error(source, plan, missing, unknown);
  for (const PlannedTensor& planned : plan) {
    const auto where = shards.find(planned.name);
    if (where) MOESAIC_RETURN_IF_ERROR(check_form(planned, *where->info));
  }
  if (!unknown.empty() && !MOESAIC_FAULT(checkpoint_accept_unknown_tensors)) {
    return unknown_error(source, unknown);
  }
  if (source.scales_stacked) share_scales(&layer.experts);
  return layer;
}

}  // namespace moesaic::checkpoint
