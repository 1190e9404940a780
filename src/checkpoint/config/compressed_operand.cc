#include "checkpoint/config/compressed_operand.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/container/names.h"
#include "quant/block_scales.h"

namespace moesaic::checkpoint {
namespace {

// null or false is no act-order, "group" the kind that needs an index; the others are settled when
// the file is written.
Status read_act_order(const nlohmann::json& json, const ConfigFields& fields,
                      CompressedOperand* op) {
  const auto it = json.find("actorder");
  if (it == json.end() || it->is_null()) return {};
  if (it->is_boolean()) {
    if (it->get<bool>()) op->act_order = "group";
    return {};
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto name, fields.string("actorder"));
  if (name && *name != "group" && *name != "weight" && *name != "static" && *name != "dynamic") {
    return fields.unsupported(
        fmt::format("actorder: got {}, need group, weight, static or null", quote_name(*name)));
  }
  op->act_order = name.value_or("");
  if (op->act_order == "dynamic") op->act_order = "group";
  return {};
}

// "dynamic" may also be the word "local": the block scales are computed, a global one is stored.
Status read_is_dynamic(const nlohmann::json& json, const ConfigFields& fields,
                       CompressedOperand* op) {
  const auto it = json.find("dynamic");
  if (it != json.end() && it->is_string()) {
    if (it->get<std::string>() == "local") return {};
    return fields.unsupported(fmt::format("dynamic: got {}, need true, false or local",
                                          quote_name(it->get<std::string>())));
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto dynamic, fields.boolean("dynamic"));
  op->dynamic = dynamic.value_or(false);
  return {};
}

// [rows, columns], or the older spelling "128x128".
Status read_block(const nlohmann::json& json, const ConfigFields& fields, CompressedOperand* op) {
  const auto field = json.find("block_structure");
  if (field != json.end() && *field == "128x128") {
    op->block = {quant::kFp8BlockSize, quant::kFp8BlockSize};
    return {};
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto block, fields.integers("block_structure", {1, 1 << 20}, 2));
  if (block) op->block = *block;
  return {};
}

}  // namespace

Result<std::optional<CompressedOperand>> read_compressed_operand(const ConfigFields& group,
                                                                 std::string_view name) {
  MOESAIC_ASSIGN_OR_RETURN(const nlohmann::json* json, group.object(name));
  if (json == nullptr) return std::optional<CompressedOperand>();
  const ConfigFields fields(*json, fmt::format("{}: {}", group.where(), name));
  CompressedOperand op;
  constexpr std::array<std::string_view, 1> kBits = {"num_bits"};
  MOESAIC_ASSIGN_OR_RETURN(op.bits, fields.required_integer(kBits, {1, 64}));
  MOESAIC_ASSIGN_OR_RETURN(const auto type, fields.string("type"));
  op.type = type.value_or("int");
  if (op.type != "int" && op.type != "float") {
    return fields.bad_value("type", quote_name(op.type), "int or float");
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto symmetric, fields.boolean("symmetric"));
  op.symmetric = symmetric.value_or(true);
  MOESAIC_RETURN_IF_ERROR(read_is_dynamic(*json, fields, &op));
  MOESAIC_ASSIGN_OR_RETURN(const auto group_size, fields.integer("group_size", {-1, 1 << 20}));
  op.group_size = group_size.value_or(0);
  MOESAIC_RETURN_IF_ERROR(read_block(*json, fields, &op));
  MOESAIC_ASSIGN_OR_RETURN(const auto strategy, fields.string("strategy"));
  // When absent, it follows from the group size, as in the format's own reader.
  op.strategy = strategy.value_or(op.group_size > 0   ? "group"
                                  : op.group_size < 0 ? "channel"
                                                      : "tensor");
  MOESAIC_RETURN_IF_ERROR(read_act_order(*json, fields, &op));
  return std::optional<CompressedOperand>(std::move(op));
}

}  // namespace moesaic::checkpoint
