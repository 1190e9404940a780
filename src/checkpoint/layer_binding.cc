#include "checkpoint/layer_binding.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/gguf_config.h"
#include "checkpoint/linear_tensors.h"
#include "checkpoint/names.h"
#include "checkpoint/stacked_tensors.h"
#include "core/checked.h"
#include "core/fault.h"
#include "quant/gguf_blocks.h"

namespace moesaic {
namespace {

constexpr std::size_t kNamesShown = 8;

std::string_view name_of(const ShardSet::Located& tensor) { return tensor.info->name; }

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

// In files whose blocks share their name with the rest of the layer, GGUF and Mistral's own: is
// this tensor of the block?
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

// --- the blocks of a layer -----------------------------------------------------------------------

std::vector<std::string> block_names(const Family& family, std::string_view layer_prefix,
                                     int layer) {
  std::vector<std::string> blocks;
  for (const ExpertLayout& layout : family.layouts) {
    if (!layout.present()) continue;
    std::string block = block_name(layer_prefix, layer, layout.block);
    if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) {
      blocks.push_back(std::move(block));
    }
  }
  return blocks;
}

bool has_tensors(const ShardSet& shards, const std::string& block) {
  return !tensors_under(shards, block + ".").empty();
}

// Which of the known prefixes ("model.layers." ...) this checkpoint's names have.
Result<std::string_view> find_prefix(const Family& family, int layer, const ShardSet& shards) {
  if (family.layer_prefix == kGgufLayerPrefix) return family.layer_prefix;
  std::optional<std::string_view> found;
  for (const std::string_view prefix : layer_prefixes()) {
    const std::vector<std::string> blocks = block_names(family, prefix, layer);
    if (std::none_of(blocks.begin(), blocks.end(),
                     [&](const std::string& block) { return has_tensors(shards, block); })) {
      continue;
    }
    if (found) {
      return Status(StatusCode::kAmbiguousFormat,
                    fmt::format("layer {}: tensors exist under both \"{}{}.\" and \"{}{}.\"", layer,
                                *found, layer, prefix, layer));
    }
    found = prefix;
  }
  return found.value_or(family.layer_prefix);
}

// --- the layout of the experts -------------------------------------------------------------------

// The spelling of a weight's suffix under which any projection of the layout exists in the block.
std::optional<std::string_view> find_layout(const Family& family, const ExpertLayout& layout,
                                            const std::string& block, const ShardSet& shards) {
  const std::string inside = block + ".";
  // A name that two layouts share does not tell which it is.
  const bool shared_down =
      std::count_if(family.layouts.begin(), family.layouts.end(), [&](const ExpertLayout& other) {
        return other.block == layout.block && other.down == layout.down &&
               other.weight_suffixes.names == layout.weight_suffixes.names;
      }) > 1;
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    if (module.empty() || (shared_down && module == layout.down)) continue;
    const std::string fixed = inside + std::string(module.substr(0, module.find("{e}")));
    for (const ShardSet::Located& tensor : tensors_under(shards, fixed)) {
      const std::string_view name = name_of(tensor).substr(inside.size());
      for (const std::string_view suffix : layout.weight_suffixes.list()) {
        if (!name.ends_with(suffix)) continue;
        if (matches_pattern(module, name.substr(0, name.size() - suffix.size()))) return suffix;
      }
    }
  }
  return std::nullopt;
}

// Is there any tensor of a single expert, whatever its last part is called (".qweight")?
bool has_single_experts(const ExpertLayout& layout, const std::string& block,
                        const ShardSet& shards) {
  if (!layout.present() || !is_per_expert(layout.storage)) return false;
  const std::string inside = block + ".";
  const std::string fixed = inside + std::string(layout.down.substr(0, layout.down.find("{e}")));
  const auto tensors = tensors_under(shards, fixed);
  return std::any_of(tensors.begin(), tensors.end(), [&](const ShardSet::Located& tensor) {
    const std::string_view name = name_of(tensor).substr(inside.size());
    for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
      if (matches_pattern(layout.down, name.substr(0, dot))) return true;
    }
    return false;
  });
}

bool same_names(const ExpertLayout& a, const ExpertLayout& b) {
  return a.block == b.block && a.gate == b.gate && a.up == b.up && a.down == b.down &&
         a.weight_suffixes.names == b.weight_suffixes.names;
}

// Which axis of the tensors the outputs lie along, for layouts with the same names (transformers
// saves Qwen3-VL's experts as it holds them, [E, out, in], not as it found them): both tensors
// together say so, since 2I == H and H == I exclude each other. Contradictions are left to the
// check of shapes.
void choose_orientation(const ShardSet& shards, LayerSource* source) {
  const ExpertLayout& layout = *source->layout;
  const auto other = std::find_if(
      source->family->layouts.begin(), source->family->layouts.end(), [&](const ExpertLayout& l) {
        return l.present() && l.storage != layout.storage && same_names(l, layout);
      });
  if (other == source->family->layouts.end()) return;
  int rows = 0, columns = 0;
  const auto look = [&](std::string_view module, std::int64_t outputs) {
    const auto tensor =
        shards.find(fmt::format("{}.{}{}", source->spec.prefix, module, source->weight_suffix));
    if (!tensor || tensor->info->rank != 3) return;
    const auto& shape = tensor->info->shape;
    if (shape[1] == outputs && shape[2] != outputs) ++rows;
    if (shape[2] == outputs && shape[1] != outputs) ++columns;
  };
  look(layout.gate, 2 * source->spec.intermediate_size);
  look(layout.down, source->spec.hidden_size);
  if (MOESAIC_FAULT(checkpoint_orientation_of_names)) return;
  if ((is_columnwise(layout.storage) ? rows : columns) > 0 &&
      (is_columnwise(layout.storage) ? columns : rows) == 0) {
    source->layout = &*other;
  }
}

Status choose_layout(const ShardSet& shards, std::string_view prefix, LayerSource* source) {
  const int layer = source->spec.layer;
  std::string fallback;  // block of the first layout that has any tensor at all
  for (const ExpertLayout& layout : source->family->layouts) {
    if (!layout.present()) continue;
    const std::string block = block_name(prefix, layer, layout.block);
    if (fallback.empty() && has_tensors(shards, block)) fallback = block;
    const std::optional<std::string_view> suffix =
        find_layout(*source->family, layout, block, shards);
    if (!suffix) continue;
    if (source->layout != nullptr && same_names(*source->layout, layout)) continue;
    if (source->layout != nullptr) {
      return {StatusCode::kAmbiguousFormat,
              fmt::format("layer {}: the experts are stored twice, as {}.{}{} and as {}.{}{}",
                          layer, source->spec.prefix, source->layout->gate, source->weight_suffix,
                          block, layout.gate, *suffix)};
    }
    source->layout = &layout;
    source->weight_suffix = *suffix;
    source->spec.prefix = block;
  }
  if (source->layout != nullptr) {
    choose_orientation(shards, source);
    return {};
  }
  // The weights of quantised linears have names of their own. Without any expert: bind_layer will
  // list what is missing from the likeliest layout.
  const ExpertLayout* likeliest = nullptr;
  for (const ExpertLayout& layout : source->family->layouts) {
    const std::string block = block_name(prefix, layer, layout.block);
    if (!layout.present() || (!fallback.empty() && block != fallback)) continue;
    const bool single = has_single_experts(layout, block, shards);
    if (single || likeliest == nullptr) {
      likeliest = &layout;
      source->spec.prefix = block;
    }
    if (single) break;
  }
  if (likeliest == nullptr) return {};
  source->layout = likeliest;
  source->weight_suffix = likeliest->weight_suffixes.names[0];
  return {};
}

// The other form where its first projection is there (and the usual one's is not).
void choose_shared_layout(const ShardSet& shards, LayerSource* source) {
  const Family& family = *source->family;
  source->shared_layout = &family.shared_layout;
  const auto exists = [&](const ExpertLayout& layout) {
    return layout.present() && shards.find(source->shared_module(layout.gate) + ".weight");
  };
  if (exists(family.shared_alternative) && !exists(family.shared_layout)) {
    source->shared_layout = &family.shared_alternative;
  }
}

// The other spelling where it is there and the usual one is not.
void choose_gate_weight(const ShardSet& shards, LayerSource* source) {
  const Family& family = *source->family;
  const auto exists = [&](std::string_view name) {
    return shards.find(fmt::format("{}.{}", source->spec.prefix, name)).has_value();
  };
  const std::string_view other = family.gate_weight_alternative;
  const bool use_other = !other.empty() && exists(other) && !exists(family.gate_weight);
  source->gate_weight = use_other ? other : family.gate_weight;
}

void choose_correction_bias(const ModelConfig& config, const ShardSet& shards,
                            LayerSource* source) {
  RoutingSpec& routing = source->spec.routing;
  if (!routing.has_correction_bias) return;
  bool found = false;
  for (const std::string_view name : source->family->correction_bias.list()) {
    if (found) break;
    found = shards.find(fmt::format("{}.{}", source->spec.prefix, name)).has_value();
    if (found || source->correction_bias.empty()) source->correction_bias = name;
  }
  if (config.bias_by_presence) routing.has_correction_bias = found;
}

// --- quantisation and dtypes ---------------------------------------------------------------------

// The last parts of the experts' module names: what skip lists spell out.
std::vector<std::string_view> projection_leaves(const ExpertLayout& layout) {
  std::vector<std::string_view> leaves;
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    if (!module.empty()) leaves.push_back(module.substr(module.rfind('.') + 1));
  }
  return leaves;
}

// MXFP4 of gpt-oss is a matter of the tensors' names as much as of the configuration: both must say
// so.
Status check_mxfp4(const LayerSource& source) {
  const bool blocks = source.layout->storage == ExpertStorage::kMxfp4Interleaved;
  const bool stated = source.experts.stored == StoredFormat::kMxfp4;
  if (blocks == stated) return {};
  return {StatusCode::kAmbiguousFormat,
          fmt::format("layer {}: the experts are stored as {}, but quantization_config says {}",
                      source.spec.layer, blocks ? "MXFP4 blocks" : "plain tensors",
                      stated ? "mxfp4" : "they are not mxfp4")};
}

// Which storages a format is known in.
Status check_storage(const LayerSource& source) {
  const StoredFormat format = source.experts.stored;
  const ExpertStorage storage = source.layout->storage;
  if (format == StoredFormat::kPlain || format == StoredFormat::kMxfp4 ||
      format == StoredFormat::kGguf || storage == ExpertStorage::kPerExpert ||
      is_stacked_format(source.experts, storage)) {
    return {};
  }
  return {StatusCode::kUnsupported,
          fmt::format("layer {}: quantization_config: {} of {} models, whose experts are stored "
                      "{}, is not supported: nothing says along which axis its codes and scales "
                      "would lie",
                      source.spec.layer, stored_format_name(format), source.family->title,
                      is_fused(storage) ? "fused" : "stacked")};
}

// The block type of every projection of a GGUF file.
Status read_blocks(const ShardSet& shards, const std::array<std::string, 3>& names,
                   LinearFormat* format) {
  std::string plain, blocks;
  for (std::size_t p = 0; p < names.size(); ++p) {
    const auto tensor = shards.find(names[p]);
    if (names[p].empty() || !tensor) continue;
    const GgmlType type = tensor->info->block_type;
    (type == GgmlType::kNone ? plain : blocks) = names[p];
    if (type == GgmlType::kNone) continue;
    if (gguf_type_info(static_cast<std::uint32_t>(type)) == nullptr) {
      return {StatusCode::kUnsupported,
              fmt::format("{}: the type {}{} is not supported, need {}", quote_name(names[p]),
                          ggml_type_info(type).name,
                          has_code_grid(type)
                              ? " (codes are indices of a grid that no published rule yields)"
                              : "",
                          gguf_type_names())};
    }
    format->stored = StoredFormat::kGguf;
    format->blocks[p] = type;
  }
  if (plain.empty() || blocks.empty()) return {};
  return {StatusCode::kUnsupported,
          fmt::format("{} is stored in blocks but {} is not, need all or none of an MLP",
                      quote_name(blocks), quote_name(plain))};
}

// Which blocks the files have for a projection that lacks: any of the others', so that the plan
// names it as missing.
void fill_blocks(LinearFormat* format) {
  if (format->stored != StoredFormat::kGguf) return;
  const auto known = std::find_if(format->blocks.begin(), format->blocks.end(),
                                  [](GgmlType type) { return type != GgmlType::kNone; });
  const GgmlType type = *known;
  std::replace(format->blocks.begin(), format->blocks.end(), GgmlType::kNone, type);
}

Status choose_gguf_formats(const ShardSet& shards, LayerSource* source) {
  const auto names = [&](const ExpertLayout& layout, bool present) {
    std::array<std::string, 3> full;
    std::size_t p = 0;
    for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
      if (present && !module.empty()) {
        full[p] = fmt::format("{}.{}.weight", source->spec.prefix, module);
      }
      ++p;
    }
    return full;
  };
  MOESAIC_RETURN_IF_ERROR(read_blocks(shards, names(*source->layout, true), &source->experts));
  fill_blocks(&source->experts);
  const bool has_shared = source->spec.shared.intermediate_size > 0;
  MOESAIC_RETURN_IF_ERROR(
      read_blocks(shards, names(*source->shared_layout, has_shared), &source->shared));
  fill_blocks(&source->shared);
  return {};
}

// The shared expert's format, as the configuration has it for its three linears.
Result<LinearFormat> shared_format(const ModelConfig& config, const LayerSource& source) {
  LinearFormat first;
  std::string first_name;
  const ExpertLayout& shared = *source.shared_layout;
  for (const std::string_view leaf : {shared.gate, shared.up, shared.down}) {
    if (leaf.empty()) continue;
    const std::string module = source.shared_module(leaf);
    const LinearFormat format = module_format(config.quant, module);
    if (first_name.empty()) {
      first = format;
      first_name = module;
    } else if (!(format == first)) {
      const bool skipped = first.stored == StoredFormat::kPlain;
      return Status(StatusCode::kUnsupported,
                    fmt::format("quantization_config: {} is left out but {} is not; need all or "
                                "none of a shared expert",
                                skipped ? first_name : module, skipped ? module : first_name));
    }
  }
  return first;
}

// One scale per tensor has two names, and files hold one of them.
void use_inverse_names(const ShardSet& shards, const std::string& module, LinearFormat* format) {
  const bool either =
      format->stored == StoredFormat::kFp8Tensor && format->names == NameStyle::kFp8;
  if (either && shards.find(module + ".weight_scale_inv")) format->names = NameStyle::kFp8Inverse;
}

// Transformers splits FP8 weights that it holds fused when it saves them, but not their scales.
void choose_scale_names(const ShardSet& shards, LayerSource* source) {
  const ExpertLayout& layout = *source->layout;
  const StoredFormat stored = source->experts.stored;
  const bool fp8 = stored == StoredFormat::kFp8Block || stored == StoredFormat::kFp8Tensor;
  if (layout.storage != ExpertStorage::kPerExpert || layout.gate.empty() || !fp8 ||
      source->experts.names != NameStyle::kFp8) {
    return;
  }
  const std::string& block = source->spec.prefix;
  source->scales_stacked =
      shards.find(fmt::format("{}.{}_scale_inv", block, kStackedGateUp)).has_value();
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    use_inverse_names(shards, fmt::format("{}.{}", block, expand_expert(module, 0)),
                      &source->experts);
  }
}

// ModelOpt's W4A8 without calibration has no scales of activations: they are computed.
void choose_inputs(const ShardSet& shards, const std::vector<std::string>& modules,
                   LinearFormat* format) {
  if (format->stored != StoredFormat::kMxfp4Linear || format->names != NameStyle::kModelOpt) return;
  const bool none = std::none_of(modules.begin(), modules.end(), [&](const std::string& module) {
    return shards.find(module + ".input_scale").has_value();
  });
  if (none) format->activation = ActivationQuant::kDynamic;
}

Status choose_formats(const ModelConfig& config, const ShardSet& shards, LayerSource* source) {
  if (config.gguf) return choose_gguf_formats(shards, source);
  const std::vector<std::string_view> leaves = projection_leaves(*source->layout);
  MOESAIC_ASSIGN_OR_RETURN(source->experts, experts_format(config.quant, source->experts_module(),
                                                           source->spec.num_experts, leaves));
  MOESAIC_RETURN_IF_ERROR(check_mxfp4(*source));
  MOESAIC_RETURN_IF_ERROR(check_storage(*source));
  choose_scale_names(shards, source);
  std::vector<std::string> modules;
  const bool per_linear = source->experts.stored == StoredFormat::kMxfp4Linear;
  for (std::int64_t e = 0; per_linear && e < source->spec.num_experts; ++e) {
    const ExpertLayout& layout = *source->layout;
    for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
      if (module.empty()) continue;
      modules.push_back(fmt::format("{}.{}", source->spec.prefix, expand_expert(module, e)));
    }
  }
  choose_inputs(shards, modules, &source->experts);
  if (source->spec.shared.intermediate_size == 0) return {};
  MOESAIC_ASSIGN_OR_RETURN(source->shared, shared_format(config, *source));
  const ExpertLayout& shared = *source->shared_layout;
  modules.clear();
  for (const std::string_view leaf : {shared.gate, shared.up, shared.down}) {
    if (leaf.empty()) continue;
    modules.push_back(source->shared_module(leaf));
    use_inverse_names(shards, modules.back(), &source->shared);
  }
  choose_inputs(shards, modules, &source->shared);
  return {};
}

// Whole groups and words in both matrices of an MLP of this width.
Status check_sizes(const LinearFormat& format, std::string_view what, std::int64_t hidden,
                   std::int64_t width) {
  if (format.stored == StoredFormat::kGguf) {
    for (std::size_t p = 0; p < 3; ++p) {
      const std::int64_t columns = p == 2 ? width : hidden;
      const std::int64_t unit = ggml_type_info(format.blocks[p]).block_elements;
      if (columns % unit == 0) continue;
      return {StatusCode::kUnsupported,
              fmt::format("{}: got {} columns with {}, need a multiple of {}", what, columns,
                          ggml_type_info(format.blocks[p]).name, unit)};
    }
    return {};
  }
  MOESAIC_RETURN_IF_ERROR(check_linear_sizes(format, what, width, hidden));
  return check_linear_sizes(format, what, hidden, width);
}

Status check_all_sizes(const LayerSource& source) {
  const MoeLayerSpec& spec = source.spec;
  const std::string what = fmt::format("layer {} (hidden_size {}, ", spec.layer, spec.hidden_size);
  MOESAIC_RETURN_IF_ERROR(check_sizes(
      source.experts, what + fmt::format("intermediate_size {})", spec.intermediate_size),
      spec.hidden_size, spec.intermediate_size));
  if (spec.shared.intermediate_size == 0) return {};
  return check_sizes(source.shared,
                     what + fmt::format("shared expert {})", spec.shared.intermediate_size),
                     spec.hidden_size, spec.shared.intermediate_size);
}

// bitsandbytes files say their block size by the number of scales of a projection.
void choose_block_size(const ShardSet& shards, const std::string& module, std::int64_t elements,
                       LinearFormat* format) {
  if (format->stored != StoredFormat::kBnb4) return;
  const auto absmax = shards.find(module + ".weight.absmax");
  if (!absmax || absmax->info->shape.rank() != 1) return;
  for (std::int64_t block = 32; block <= 4096; block *= 2) {
    if (absmax->info->shape[0] == ceil_div(elements, block)) format->group_size = block;
  }
}

struct FoundDType {
  DType dtype;
  bool mixed = false;  // several: F32 holds them all
};

// The dtype of the weights that exist under the names, checked against the format.
Result<FoundDType> find_dtype(const ShardSet& shards, StoredFormat format,
                              const std::vector<std::string>& names, DType fallback) {
  if (format != StoredFormat::kPlain && format != StoredFormat::kFp8Block) {
    return FoundDType{fallback};
  }
  std::optional<FoundDType> found;
  for (const std::string& name : names) {
    const auto tensor = shards.find(name);
    if (!tensor) continue;
    const DType dtype = tensor->info->dtype;
    const DTypeSet allowed = format == StoredFormat::kFp8Block
                                 ? DTypeSet{DType::kF8E4M3}
                                 : DTypeSet{DType::kBF16, DType::kF16, DType::kF32};
    if (allowed.contains(dtype)) {
      if (!found) found = FoundDType{dtype};
      if (found->dtype != dtype) found = FoundDType{DType::kF32, true};
      continue;
    }
    return Status(StatusCode::kInvalidDType,
                  fmt::format("{}: got {}, need {} as the configuration's quantisation says",
                              quote_name(name), dtype_name(dtype), allowed.to_string()));
  }
  return found.value_or(FoundDType{format == StoredFormat::kFp8Block ? DType::kF8E4M3 : fallback});
}

Status choose_dtypes(const ModelConfig& config, const ShardSet& shards, LayerSource* source) {
  MoeLayerSpec& spec = source->spec;
  const ExpertLayout& layout = *source->layout;
  const std::int64_t elements = spec.hidden_size * spec.intermediate_size;
  std::vector<std::string> names;
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    if (module.empty()) continue;
    choose_block_size(shards, fmt::format("{}.{}", spec.prefix, expand_expert(module, 0)), elements,
                      &source->experts);
    const std::int64_t holders = is_per_expert(layout.storage) ? spec.num_experts : 1;
    for (std::int64_t e = 0; e < holders; ++e) {
      names.push_back(
          fmt::format("{}.{}{}", spec.prefix, expand_expert(module, e), source->weight_suffix));
    }
  }
  const bool blocks = source->experts.stored == StoredFormat::kMxfp4;
  const DType unsaid = blocks ? DType::kF4E2M1 : spec.activation_dtype;
  MOESAIC_ASSIGN_OR_RETURN(const FoundDType experts,
                           find_dtype(shards, source->experts.stored, names, unsaid));
  source->experts_dtype = experts.dtype;
  source->experts_mixed = experts.mixed;
  names.clear();
  const ExpertLayout& shared = *source->shared_layout;
  for (const std::string_view leaf : {shared.gate, shared.up, shared.down}) {
    if (leaf.empty()) continue;
    names.push_back(source->shared_module(leaf) + ".weight");
    choose_block_size(shards, source->shared_module(leaf),
                      spec.hidden_size * spec.shared.intermediate_size, &source->shared);
  }
  MOESAIC_ASSIGN_OR_RETURN(const FoundDType beside,
                           find_dtype(shards, source->shared.stored, names, spec.activation_dtype));
  source->shared_dtype = beside.dtype;
  source->shared_mixed = beside.mixed;
  MOESAIC_ASSIGN_OR_RETURN(spec.quant, linear_scheme(source->experts, source->experts_dtype));
  if (source->experts.stored == StoredFormat::kPlain && !config.stated_dtype) {
    // A configuration without a dtype means the one the weights were saved in.
    spec.activation_dtype = source->experts_dtype;
  }
  return check_all_sizes(*source);
}

// --- checks --------------------------------------------------------------------------------------

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

Status check_form(const PlannedTensor& want, const TensorInfo& got) {
  if (!want.dtypes.contains(got.dtype) || want.block_type != got.block_type) {
    const auto block_or = [](GgmlType type, std::string dtype) {
      return type == GgmlType::kNone ? dtype : std::string(ggml_type_info(type).name);
    };
    return {StatusCode::kInvalidDType,
            fmt::format("{}: got {}, need {}", quote_name(want.name),
                        block_or(got.block_type, std::string(dtype_name(got.dtype))),
                        block_or(want.block_type, want.dtypes.to_string()))};
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

// Is `name` a tensor of an expert that the layer does not have, or a second spelling of a weight
// that it has? Then the files contradict the configuration or themselves; other names may mean
// something that this version does not know.
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

// Names inside the layer's blocks that the plan does not have.
std::vector<std::string_view> unknown_names(const LayerSource& source, const ShardSet& shards,
                                            const std::vector<PlannedTensor>& plan) {
  std::set<std::string_view> known;
  for (const PlannedTensor& tensor : plan) known.insert(tensor.name);
  std::vector<std::string_view> unknown;
  // Every block the family may use: Mixtral's other spelling must not hide a second copy.
  std::string_view layer = source.spec.prefix;
  layer.remove_suffix(source.layout->block.size());
  std::set<std::string> blocks;
  for (const ExpertLayout& layout : source.family->layouts) {
    if (layout.present()) blocks.insert(fmt::format("{}{}.", layer, layout.block));
  }
  if (source.family->router_beside_block) {
    const std::string_view gate = source.family->gate_weight;
    blocks.insert(fmt::format("{}{}.", layer, gate.substr(0, gate.find('.'))));
  }
  for (const std::string& block : blocks) {
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
  const bool bare = is_layer_number(std::string_view(block).substr(block.rfind('.') + 1));
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
  MOESAIC_ASSIGN_OR_RETURN(const std::string_view prefix,
                           find_prefix(*config.family, spec.layer, shards));
  MOESAIC_RETURN_IF_ERROR(choose_layout(shards, prefix, &source));
  choose_shared_layout(shards, &source);
  choose_gate_weight(shards, &source);
  choose_correction_bias(config, shards, &source);
  MOESAIC_RETURN_IF_ERROR(choose_formats(config, shards, &source));
  MOESAIC_RETURN_IF_ERROR(choose_dtypes(config, shards, &source));
  return source;
}

Result<BoundLayer> bind_layer(const ModelConfig& config, const MoeLayerSpec& spec,
                              const ShardSet& shards) {
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
    } else if (!planned.optional) {
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

}  // namespace moesaic
