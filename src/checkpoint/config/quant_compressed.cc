// quantization_config of compressed-tensors. Source: docs/spec/checkpoints.md section 4.1.
#include <fmt/format.h>

#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/config/compressed_operand.h"
#include "checkpoint/config/quant_methods.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "quant/block_scales.h"
#include "quant/int4_fp8.h"
#include "quant/mx.h"
#include "quant/nvfp4.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::size_t kMaxGroups = 64;

using Operand = CompressedOperand;

Status bad_weights(const ConfigFields& group, const Operand& w, std::string_view need) {
  return group.unsupported(fmt::format("weights: got {} {} bits, strategy {}, need {}", w.type,
                                       w.bits, quote_name(w.strategy), need));
}

Status bad_inputs(const ConfigFields& group, const Operand& in, std::string_view need) {
  return group.unsupported(fmt::format("input_activations: got {} {} {} bits, strategy {}, need {}",
                                       in.dynamic ? "dynamic" : "static", in.type, in.bits,
                                       quote_name(in.strategy), need));
}

// For operands that fit but for this.
Status need_symmetric(const ConfigFields& group, const Operand& op, std::string_view side) {
  if (op.symmetric) return {};
  return group.unsupported(fmt::format("{}: symmetric: got false, need true", side));
}

Status float_format(const ConfigFields& group, const Operand& w, const std::optional<Operand>& in,
                    LinearFormat* f) {
  if (w.bits != 8 || w.type != "float") return bad_weights(group, w, "float 8 bits");
  MOESAIC_RETURN_IF_ERROR(need_symmetric(group, w, "weights"));
  if (w.strategy == "tensor") {
    f->stored = StoredFormat::kFp8Tensor;
  } else if (w.strategy == "channel") {
    f->stored = StoredFormat::kFp8Channel;
  } else if (w.strategy == "block") {
    f->stored = StoredFormat::kFp8Block;
    if (w.block.size() != 2) {
      return group.unsupported(
          fmt::format("weights: block_structure: got [{}], need [rows, columns], [128, 128] mostly",
                      fmt::join(w.block, ", ")));
    }
    f->block = {w.block[0], w.block[1]};
  } else {
    return bad_weights(group, w, "strategy tensor, channel or block");
  }
  if (!in) return {};
  if (in->bits != 8 || in->type != "float") return bad_inputs(group, *in, "float 8 bits");
  MOESAIC_RETURN_IF_ERROR(need_symmetric(group, *in, "input_activations"));
  f->activation = in->dynamic ? ActivationQuant::kDynamic : ActivationQuant::kStatic;
  if (!in->dynamic && (in->strategy != "tensor" || f->stored == StoredFormat::kFp8Block)) {
    return bad_inputs(group, *in, "dynamic, or static with strategy tensor and no block weights");
  }
  if (!in->dynamic) return {};
  const bool by_group = f->stored == StoredFormat::kFp8Block;
  const bool fits = by_group ? in->strategy == "group" && in->group_size == f->block.k
                             : in->strategy == "token" || in->strategy == "tensor";
  f->batch_scale = in->strategy == "tensor";
  if (fits) return {};
  return bad_inputs(group, *in,
                    by_group ? fmt::format("strategy group with group_size {}", f->block.k)
                             : "strategy token or tensor");
}

// Of W4A8: a scale per token, or one per tensor, dynamic or stored.
bool is_float8_rows(const Operand& in) {
  return in.bits == 8 && in.type == "float" && in.symmetric &&
         (in.strategy == "tensor" || (in.strategy == "token" && in.dynamic));
}

Status packed_format(const ConfigFields& group, const Operand& w, const std::optional<Operand>& in,
                     LinearFormat* f) {
  f->stored = StoredFormat::kPacked;
  if ((w.bits != 4 && w.bits != 8) || w.type != "int") {
    return bad_weights(group, w, "int 4 or 8 bits");
  }
  if (w.strategy == "group" && w.group_size > 0) {
    f->group_size = w.group_size;
  } else if (w.strategy == "channel") {
    f->group_size = -1;
  } else {
    return bad_weights(group, w, "strategy group (with group_size) or channel");
  }
  f->bits = static_cast<int>(w.bits);
  f->zero_points = !w.symmetric;
  f->act_order = w.act_order == "group" && f->group_size > 0;
  if (!in) return {};
  const bool w4a8 = is_float8_rows(*in) && f->bits == 4 && f->group_size > 0 &&
                    f->group_size % quant::kInt4Fp8GroupUnit == 0 && w.symmetric && !f->act_order;
  if (!w4a8) {
    return bad_inputs(group, *in,
                      "none, or float 8 bits per token (dynamic) or tensor with symmetric int4 "
                      "weights in groups of a multiple of 32 (128 is usual)");
  }
  f->activation = in->dynamic ? ActivationQuant::kDynamic : ActivationQuant::kStatic;
  f->batch_scale = in->dynamic && in->strategy == "tensor";
  return {};
}

Status int_format(const ConfigFields& group, const Operand& w, const std::optional<Operand>& in,
                  LinearFormat* f) {
  // W4AFP8: the codes of pack-quantized, one per byte.
  if (w.bits == 4 && w.type == "int" && w.symmetric && w.strategy == "group" && in &&
      is_float8_rows(*in)) {
    f->byte_codes = true;
    return packed_format(group, w, in, f);
  }
  f->stored = StoredFormat::kInt8Channel;
  if (w.bits != 8 || w.type != "int") return bad_weights(group, w, "int 8 bits");
  MOESAIC_RETURN_IF_ERROR(need_symmetric(group, w, "weights"));
  if (w.strategy != "channel" && w.strategy != "tensor") {
    return bad_weights(group, w, "strategy channel or tensor");
  }
  f->one_scale = w.strategy == "tensor";
  if (!in) return {};
  if (in->bits != 8 || in->type != "int" || !in->dynamic || in->strategy != "token") {
    return bad_inputs(group, *in, "dynamic int 8 bits, strategy token");
  }
  MOESAIC_RETURN_IF_ERROR(need_symmetric(group, *in, "input_activations"));
  f->activation = ActivationQuant::kDynamic;
  return {};
}

Status fp4_format(const ConfigFields& group, const Operand& w, const std::optional<Operand>& in,
                  StoredFormat stored, std::int64_t group_size, LinearFormat* f) {
  f->stored = stored;
  const std::int64_t bits = stored == StoredFormat::kMxfp8 ? 8 : 4;
  if (w.bits != bits || w.type != "float" || w.group_size != group_size) {
    return bad_weights(group, w, fmt::format("float {} bits, group_size {}", bits, group_size));
  }
  if (!in) return {};
  const bool same = in->bits == bits && in->type == "float" && in->group_size == group_size;
  if (stored == StoredFormat::kMxfp4Linear && in->bits == 8 && in->type == "float" &&
      in->symmetric && in->dynamic && in->strategy == "group" &&
      in->group_size == quant::kFp8BlockSize) {
    f->bits = 8;
    f->activation = ActivationQuant::kDynamic;
    return {};
  }
  if (!same) {
    return bad_inputs(
        group, *in,
        stored == StoredFormat::kMxfp4Linear
            ? "none, float 4 bits with group_size 32, or dynamic symmetric float 8 "
              "bits with strategy group and group_size 128"
            : fmt::format("none, or float {} bits with group_size {}", bits, group_size));
  }
  f->activation =
      stored == StoredFormat::kNvfp4 ? ActivationQuant::kStatic : ActivationQuant::kDynamic;
  return {};
}

// Plain for a group without weights; `activation` then says whether it has activations.
Result<LinearFormat> group_format(const ConfigFields& group,
                                  const std::optional<std::string>& stated) {
  MOESAIC_ASSIGN_OR_RETURN(const auto weights, read_compressed_operand(group, "weights"));
  MOESAIC_ASSIGN_OR_RETURN(const auto inputs, read_compressed_operand(group, "input_activations"));
  LinearFormat f;
  f.names = NameStyle::kCompressed;
  if (!weights) {
    if (inputs) f.activation = ActivationQuant::kDynamic;
    return f;
  }
  if (!stated) {
    return Status(StatusCode::kCorruptFile, group.where() + ": format: missing, need a name");
  }
  const std::string& format = *stated;
  const bool naive = format == "naive-quantized";
  Status status;
  if (format == "float-quantized" || (naive && weights->type == "float")) {
    status = float_format(group, *weights, inputs, &f);
  } else if (format == "int-quantized" || naive) {
    status = int_format(group, *weights, inputs, &f);
  } else if (format == "pack-quantized") {
    status = packed_format(group, *weights, inputs, &f);
  } else if (format == "nvfp4-pack-quantized") {
    status = fp4_format(group, *weights, inputs, StoredFormat::kNvfp4, quant::kNvfp4GroupSize, &f);
  } else if (format == "mxfp4-pack-quantized") {
    status =
        fp4_format(group, *weights, inputs, StoredFormat::kMxfp4Linear, quant::kMxGroupSize, &f);
  } else if (format == "mxfp8-quantized") {
    status = fp4_format(group, *weights, inputs, StoredFormat::kMxfp8, quant::kMxGroupSize, &f);
  } else {
    status =
        group.unsupported(fmt::format("format: got {}, need float-quantized, int-quantized, "
                                      "naive-quantized, pack-quantized, "
                                      "nvfp4-pack-quantized, mxfp4-pack-quantized or "
                                      "mxfp8-quantized",
                                      quote_name(format)));
  }
  if (!status.ok()) return status;
  return f;
}

// Other transformations of the weights, which reading them as they are would ignore.
Status refuse_transforms(const ConfigFields& fields) {
  for (const std::string_view name : {"sparsity_config", "transform_config"}) {
    MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* object, fields.object(name));
    if (object == nullptr || object->empty()) continue;
    const auto format = object->find("format");
    if (format != object->end() && format->is_string() && *format == "dense") continue;
    return fields.unsupported(fmt::format("{} is not supported, need none", name));
  }
  return {};
}

// Experts that were left out, or made constants, in some layers: all layers are read as having the
// experts that the model's configuration says.
Status refuse_sparse_experts(const ConfigFields& fields) {
  constexpr std::string_view kField = "moe_sparsity_config";
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* object, fields.object(kField));
  if (object == nullptr || MOESAIC_FAULT(checkpoint_sparse_experts_unread)) return {};
  const ConfigFields sparsity(*object, fmt::format("{}: {}", fields.where(), kField));
  MOESAIC_ASSIGN_OR_RETURN(const auto method, sparsity.string("method"));
  if (method != "prune") {
    return sparsity.unsupported(
        fmt::format("method: got {}, need \"prune\"", method ? quote_name(*method) : "none"));
  }
  const auto counts = object->find("num_experts");
  if (counts == object->end() || !counts->is_array()) {
    return {StatusCode::kCorruptFile,
            fmt::format("{}: num_experts: need a list with an entry per layer", sparsity.where())};
  }
  const nlohmann::json* first = nullptr;
  for (const nlohmann::json& count : *counts) {
    if (count.is_null()) continue;  // a dense layer
    if (first == nullptr) first = &count;
    if (count == *first) continue;
    return sparsity.unsupported(
        fmt::format("num_experts: got {} and {}, need as many experts in "
                    "all layers",
                    first->dump(), count.dump()));
  }
  return {};
}

// Of two groups with the same target the later one in the file is taken by the format's own reader;
// which that is, a JSON object does not say.
Status check_targets(const QuantConfig& quant, const std::string& where) {
  std::map<std::string_view, const QuantGroup*> seen;
  for (const QuantGroup& group : quant.groups) {
    for (const std::string& target : group.targets) {
      const auto [at, added] = seen.emplace(target, &group);
      if (added || at->second->format == group.format) continue;
      return {StatusCode::kAmbiguousFormat,
              fmt::format("{}: config_groups: {} and {} have the target {} and differ, need one "
                          "group for it",
                          where, quote_name(at->second->name), quote_name(group.name),
                          quote_name(target))};
    }
  }
  return {};
}

}  // namespace

Result<QuantConfig> parse_compressed_tensors(const ConfigFields& fields) {
  QuantConfig quant;
  quant.rule = NameRule::kExactOrRegex;
  MOESAIC_RETURN_IF_ERROR(refuse_transforms(fields));
  MOESAIC_RETURN_IF_ERROR(refuse_sparse_experts(fields));
  MOESAIC_ASSIGN_OR_RETURN(const auto top_format, fields.string("format"));
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* groups, fields.object("config_groups"));
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* cache, fields.object("kv_cache_scheme"));
  const bool none = groups == nullptr || groups->empty();
  if (none && cache != nullptr) return quant;  // the cache of attention alone is quantised
  if (none) {
    return Status(StatusCode::kCorruptFile,
                  fields.where() + ": config_groups: missing, need at least one group");
  }
  if (groups->size() > kMaxGroups) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("{}: config_groups: got {} groups, need at most {}", fields.where(),
                              groups->size(), kMaxGroups));
  }
  for (const auto& [name, json] : groups->items()) {
    const std::string where =
        fmt::format("{}: config_groups: {}", fields.where(), quote_name(name));
    if (!json.is_object()) return Status(StatusCode::kCorruptFile, where + ": need an object");
    const ConfigFields group(json, where);
    MOESAIC_ASSIGN_OR_RETURN(const auto own_format, group.string("format"));
    QuantGroup made;
    made.name = name;
    MOESAIC_ASSIGN_OR_RETURN(made.format,
                             group_format(group, own_format ? own_format : top_format));
    MOESAIC_ASSIGN_OR_RETURN(auto targets, group.strings("targets", kMaxSkipEntries));
    if (!targets) {
      return Status(StatusCode::kCorruptFile, where + ": targets: missing, need a list of names");
    }
    const bool weights = made.format.stored != StoredFormat::kPlain;
    if (targets->empty() || (!weights && made.format.activation == ActivationQuant::kNone))
      continue;
    made.targets = std::move(*targets);
    if (weights && quant.linear.stored == StoredFormat::kPlain) quant.linear = made.format;
    quant.groups.push_back(std::move(made));
  }
  MOESAIC_RETURN_IF_ERROR(check_targets(quant, fields.where()));
  MOESAIC_RETURN_IF_ERROR(append_skips(fields, "ignore", true, &quant));
  return quant;
}

}  // namespace moesaic::checkpoint
