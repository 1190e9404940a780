// How a layer's tensors are quantised and of which dtype they are: what the configuration says,
// what the files have.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/binding/layer_choices.h"
#include "checkpoint/binding/stacked_tensors.h"
#include "checkpoint/config/linear_tensors.h"
#include "checkpoint/container/names.h"
#include "core/checked.h"
#include "core/fault.h"
#include "quant/bnb.h"
#include "quant/gguf_blocks.h"

namespace moesaic::checkpoint {
namespace {

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

// Without any of the experts' tensors the configuration alone says what is missing.
void choose_missing_mxfp4(const ShardSet& shards, LayerSource* source) {
  const auto& layouts = source->family->layouts;
  const auto blocks = std::find_if(layouts.begin(), layouts.end(), [](const ExpertLayout& l) {
    return l.present() && l.storage == ExpertStorage::kMxfp4Interleaved;
  });
  if (source->experts.stored != StoredFormat::kMxfp4 || blocks == layouts.end()) return;
  const bool any =
      source->layout->present() && !tensors_under(shards, source->experts_module() + ".").empty();
  if (any || MOESAIC_FAULT(checkpoint_missing_blocks_are_plain)) return;
  source->layout = &*blocks;
  source->weight_suffix = blocks->weight_suffixes.names[0];
}

// Refuses a storage in which the format's layout is not known.
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

// Activations that are quantised in front of plain weights are no scheme that is computed.
Status check_activations(const LinearFormat& format, std::string_view module) {
  if (format.stored != StoredFormat::kPlain || format.activation == ActivationQuant::kNone)
    return {};
  return {
      StatusCode::kUnsupported,
      fmt::format("quantization_config: {}: got activations alone, need weights as well", module)};
}

// Whether the configuration's word for linears is not meant for these experts: all that is there of
// them are plain weights. In memory they lay in tensors of all, whose modules are no linears;
// transformers saves them like that or one by one.
bool lie_plain(const ModelConfig& config, const ShardSet& shards, const LayerSource& source) {
  const ExpertLayout& layout = *source.layout;
  const std::array modules = {layout.gate, layout.up, layout.down};
  const std::string one =
      fmt::format("{}.0.{}", source.experts_module(), projection_leaves(layout).front());
  if (source.experts.stored == StoredFormat::kPlain ||
      (!is_quantised_as_linear(config.quant, one) && !MOESAIC_FAULT(checkpoint_any_plain_stays))) {
    return false;
  }
  constexpr DTypeSet kPlain = {DType::kBF16, DType::kF16, DType::kF32};
  const std::string block = source.spec.prefix + ".";
  bool any = false;
  const auto known = [&](const TensorInfo& tensor) {
    const std::string_view name = std::string_view{tensor.name}.substr(block.size());
    if (name == source.correction_bias) return true;
    return std::any_of(modules.begin(), modules.end(), [&](std::string_view module) {
      if (module.empty()) return false;
      const std::string_view bias = layout.bias_suffix;
      if (!bias.empty() && name.ends_with(bias) &&
          matches_pattern(module, name.substr(0, name.size() - bias.size()))) {
        return true;
      }
      const std::string_view suffix = source.weight_suffix;
      const bool weight = name.ends_with(suffix) && kPlain.contains(tensor.dtype) &&
                          matches_pattern(module, name.substr(0, name.size() - suffix.size()));
      any = any || weight;
      return weight;
    });
  };
  for (const std::string_view module : modules) {
    if (module.empty()) continue;
    const auto tensors =
        tensors_under(shards, block + std::string(module.substr(0, module.find("{e}"))));
    for (const ShardSet::Located& tensor : tensors) {
      if (!known(*tensor.info)) return false;
    }
  }
  return any;
}

// The experts, ascending, of which a tensor exists whose name begins as the module's: 0 alone for a
// module of all experts. Layers without tensors cost nothing, whatever the configuration says.
std::vector<std::int64_t> stored_experts(const ShardSet& shards, const MoeLayerSpec& spec,
                                         std::string_view module) {
  const std::size_t number = module.find("{e}");
  if (number == module.npos) return {0};
  const std::string fixed = fmt::format("{}.{}", spec.prefix, module.substr(0, number));
  std::vector<std::int64_t> experts;
  for (const ShardSet::Located& tensor : tensors_under(shards, fixed)) {
    std::string_view rest = tensor.info->name;
    rest.remove_prefix(fixed.size());
    std::int64_t e = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), e);
    const bool plain = rest.substr(0, 1) != "0" || end == rest.data() + 1;
    if (error != std::errc() || !plain || e < 0 || e >= spec.num_experts) continue;
    if (experts.empty() || experts.back() != e) experts.push_back(e);
  }
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  return experts;
}

// Reads the block type of every projection of a GGUF file.
Status read_blocks(const ShardSet& shards, const std::array<std::string, 3>& names,
                   LinearFormat* format) {
  std::string plain, blocks;
  for (std::size_t p = 0; p < names.size(); ++p) {
    const auto tensor = shards.find(names[p]);
    if (names[p].empty() || !tensor) continue;
    const quant::GgufType type = tensor->info->block_type;
    (type == quant::GgufType::kNone ? plain : blocks) = names[p];
    if (type == quant::GgufType::kNone) continue;
    if (quant::gguf_type_info(static_cast<std::uint32_t>(type)) == nullptr) {
      return {StatusCode::kUnsupported,
              fmt::format("{}: the type {}{} is not supported, need {}", quote_name(names[p]),
                          ggml_type_info(type).name,
                          has_code_grid(type)
                              ? " (codes are indices of a grid that no published rule yields)"
                              : "",
                          quant::gguf_type_names())};
    }
    format->stored = StoredFormat::kGguf;
    format->blocks[p] = type;
    const std::string module = names[p].substr(0, names[p].rfind('.'));
    if (shards.find(module + ".scale") && !MOESAIC_FAULT(checkpoint_outer_scale_forgotten)) {
      format->outer_scale = true;
    }
  }
  if (plain.empty() || blocks.empty()) return {};
  return {StatusCode::kUnsupported,
          fmt::format("{} is stored in blocks but {} is not, need all or none of an MLP",
                      quote_name(blocks), quote_name(plain))};
}

// Gives a projection without a tensor the block type of another one, so that the plan names it as
// missing.
void fill_blocks(LinearFormat* format) {
  if (format->stored != StoredFormat::kGguf) return;
  const auto known =
      std::find_if(format->blocks.begin(), format->blocks.end(),
                   [](quant::GgufType type) { return type != quant::GgufType::kNone; });
  const quant::GgufType type = *known;
  std::replace(format->blocks.begin(), format->blocks.end(), quant::GgufType::kNone, type);
}

Status choose_gguf_formats(const ShardSet& shards, LayerSource* source) {
  const auto weight = [&](std::string_view module, std::int64_t expert) {
    return fmt::format("{}.{}.weight", source->spec.prefix, expand_expert(module, expert));
  };
  const auto names = [&](const ExpertLayout& layout, bool present) {
    std::array<std::string, 3> full;
    std::size_t p = 0;
    for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
      std::string& name = full[p++];
      if (!present || module.empty()) continue;
      name = weight(module, 0);
      // The first that is there: a program that hands tensors over may leave out those of other ranks.
      for (const std::int64_t e : stored_experts(shards, source->spec, module)) {
        if (shards.find(name) || MOESAIC_FAULT(checkpoint_blocks_of_the_first_expert)) break;
        name = weight(module, e);
      }
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
    MOESAIC_RETURN_IF_ERROR(check_overrides(config.quant, module));
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
  // As the first expert has it that is there: a program that hands tensors over may leave out those
  // of other ranks.
  bool found = stored != StoredFormat::kFp8Tensor;
  for (const std::int64_t e : stored_experts(shards, source->spec, layout.down)) {
    if (found) break;
    for (const std::string_view leaf : {layout.gate, layout.up, layout.down}) {
      const std::string module = fmt::format("{}.{}", block, expand_expert(leaf, e));
      use_inverse_names(shards, module, &source->experts);
      found = found || shards.find(module + ".weight_scale") ||
              source->experts.names == NameStyle::kFp8Inverse;
    }
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
  MOESAIC_ASSIGN_OR_RETURN(
      source->experts, experts_format(config.quant, source->experts_module(),
                                      source->spec.num_experts, leaves, std::ssize(config.layers)));
  source->left_plain = lie_plain(config, shards, *source);
  if (source->left_plain) source->experts = LinearFormat{};
  MOESAIC_RETURN_IF_ERROR(check_activations(source->experts, source->experts_module()));
  choose_missing_mxfp4(shards, source);
  MOESAIC_RETURN_IF_ERROR(check_mxfp4(*source));
  MOESAIC_RETURN_IF_ERROR(check_storage(*source));
  choose_scale_names(shards, source);
  std::vector<std::string> modules;
  const bool per_linear = source->experts.stored == StoredFormat::kMxfp4Linear;
  const ExpertLayout& layout = *source->layout;
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    if (!per_linear || module.empty()) continue;
    for (const std::int64_t e : stored_experts(shards, source->spec, module))
      modules.push_back(fmt::format("{}.{}", source->spec.prefix, expand_expert(module, e)));
  }
  choose_inputs(shards, modules, &source->experts);
  if (source->spec.shared.intermediate_size == 0) return {};
  MOESAIC_ASSIGN_OR_RETURN(source->shared, shared_format(config, *source));
  const ExpertLayout& shared = *source->shared_layout;
  MOESAIC_RETURN_IF_ERROR(check_activations(source->shared, source->shared_module(shared.down)));
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
  for (std::int64_t block = quant::kBnbMinBlockSize; block <= quant::kBnbMaxBlockSize; block *= 2) {
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
    const quant::GgufType block = tensor->info->block_type;
    if (block != quant::GgufType::kNone) {  // of one expert among plain ones
      return Status(StatusCode::kInvalidDType,
                    fmt::format("{}: got {}, need {} as the other experts have", quote_name(name),
                                ggml_type_info(block).name, allowed.to_string()));
    }
    return Status(StatusCode::kInvalidDType,
                  fmt::format("{}: got {}, need {} as the configuration's quantisation says",
                              quote_name(name), dtype_name(dtype), allowed.to_string()));
  }
  return found.value_or(FoundDType{format == StoredFormat::kFp8Block ? DType::kF8E4M3 : fallback});
}

// The dtype of the scales of integer codes, F16 or BF16 where all that are there have it.
void find_scale_dtype(const ShardSet& shards, const std::vector<std::string>& modules,
                      LinearFormat* format) {
  const bool integers = format->stored == StoredFormat::kPacked ||
                        format->stored == StoredFormat::kGptq ||
                        format->stored == StoredFormat::kAwq;
  if (!integers) return;
  std::string_view suffix;
  for (const LinearTensor& t : linear_tensors(*format, 0, 0)) {
    if (t.kind == TensorKind::kScale) suffix = t.suffix;
  }
  std::optional<DType> found;
  for (const std::string& module : modules) {
    const auto tensor = shards.find(fmt::format("{}{}", module, suffix));
    if (!tensor) continue;
    if (found.value_or(tensor->info->dtype) != tensor->info->dtype) return;
    found = tensor->info->dtype;
  }
  if (found == DType::kF16 || found == DType::kBF16) format->scale_dtype = *found;
}

Status choose_dtypes(const ModelConfig& config, const ShardSet& shards, LayerSource* source) {
  MoeLayerSpec& spec = source->spec;
  const ExpertLayout& layout = *source->layout;
  const std::int64_t elements = spec.hidden_size * spec.intermediate_size;
  std::vector<std::string> names, modules;
  for (const std::string_view module : {layout.gate, layout.up, layout.down}) {
    if (module.empty()) continue;
    const std::vector<std::int64_t> holders = stored_experts(shards, spec, module);
    const bool sized_by_file = source->experts.stored == StoredFormat::kBnb4;
    // The first that is there has the last word.
    for (auto e = holders.rbegin(); sized_by_file && e != holders.rend(); ++e) {
      choose_block_size(shards, fmt::format("{}.{}", spec.prefix, expand_expert(module, *e)),
                        elements, &source->experts);
    }
    for (const std::int64_t e : holders) {
      modules.push_back(fmt::format("{}.{}", spec.prefix, expand_expert(module, e)));
      names.push_back(fmt::format("{}{}", modules.back(), source->weight_suffix));
    }
  }
  find_scale_dtype(shards, modules, &source->experts);
  const bool blocks = source->experts.stored == StoredFormat::kMxfp4;
  const DType unsaid = blocks ? DType::kF4E2M1 : spec.activation_dtype;
  MOESAIC_ASSIGN_OR_RETURN(const FoundDType experts,
                           find_dtype(shards, source->experts.stored, names, unsaid));
  source->experts_dtype = experts.dtype;
  source->experts_mixed = experts.mixed;
  names.clear();
  modules.clear();
  const ExpertLayout& shared = *source->shared_layout;
  for (const std::string_view leaf : {shared.gate, shared.up, shared.down}) {
    if (leaf.empty()) continue;
    modules.push_back(source->shared_module(leaf));
    names.push_back(modules.back() + ".weight");
    choose_block_size(shards, source->shared_module(leaf),
                      spec.hidden_size * spec.shared.intermediate_size, &source->shared);
  }
  find_scale_dtype(shards, modules, &source->shared);
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

}  // namespace

Status choose_numbers(const ModelConfig& config, const ShardSet& shards, LayerSource* source) {
  MOESAIC_RETURN_IF_ERROR(choose_formats(config, shards, source));
  return choose_dtypes(config, shards, source);
}

}  // namespace moesaic::checkpoint
