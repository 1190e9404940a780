#include "checkpoint/config/compressed_operand.h"

#include <fmt/format.h>

#include <array>
#include <cctype>
#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "checkpoint/container/names.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::int64_t kMaxBlockSide = 1 << 20;

// The format's own reader takes its words in any case.
Result<std::optional<std::string>> word(const ConfigFields& fields, std::string_view name) {
  MOESAIC_ASSIGN_OR_RETURN(auto text, fields.string(name));
  if (text && !MOESAIC_FAULT(checkpoint_words_as_written)) {
    for (char& c : *text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

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
  MOESAIC_ASSIGN_OR_RETURN(const auto name, word(fields, "actorder"));
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
    MOESAIC_ASSIGN_OR_RETURN(const auto name, word(fields, "dynamic"));
    if (name == "local") return {};
    return fields.unsupported(fmt::format("dynamic: got {}, need true, false or local",
                                          quote_name(it->get<std::string>())));
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto dynamic, fields.boolean("dynamic"));
  op->dynamic = dynamic.value_or(false);
  return {};
}

// [rows, columns], or the older spelling "128x128".
std::vector<std::int64_t> block_of_text(std::string_view text) {
  std::vector<std::int64_t> sides;
  while (true) {
    const std::size_t end = text.find('x');
    const std::string_view side = text.substr(0, end);
    std::int64_t number = 0;
    const auto [at, error] = std::from_chars(side.data(), side.data() + side.size(), number);
    if (error != std::errc() || at != side.data() + side.size() || number < 1 ||
        number > kMaxBlockSide) {
      return {};
    }
    sides.push_back(number);
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return sides;
}

Status read_block(const nlohmann::json& json, const ConfigFields& fields, CompressedOperand* op) {
  const auto field = json.find("block_structure");
  if (field != json.end() && field->is_string()) {
    MOESAIC_ASSIGN_OR_RETURN(const auto text, word(fields, "block_structure"));
    op->block = block_of_text(*text);
    if (op->block.size() == 2) return {};
    return fields.bad_value("block_structure", quote_name(*text),
                            "rows and columns such as 128x128 or [128, 128]");
  }
  MOESAIC_ASSIGN_OR_RETURN(const auto block,
                           fields.integers("block_structure", {1, kMaxBlockSide}, 2));
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
  MOESAIC_ASSIGN_OR_RETURN(const auto bits, fields.integer(kBits, {1, 64}));
  op.bits = bits.value_or(8);  // as in the format's own reader
  MOESAIC_ASSIGN_OR_RETURN(const auto type, word(fields, "type"));
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
  MOESAIC_ASSIGN_OR_RETURN(const auto strategy, word(fields, "strategy"));
  // When absent, it follows from the group size, as in the format's own reader.
  op.strategy = strategy.value_or(op.group_size > 0   ? "group"
                                  : op.group_size < 0 ? "channel"
                                                      : "tensor");
  const bool grouped = op.strategy == "group" || op.strategy == "tensor_group";
  if (op.group_size > 0 && !grouped && !MOESAIC_FAULT(checkpoint_groups_of_no_strategy)) {
    return fields.unsupported(fmt::format("group_size: got {} with strategy {}, need group",
                                          op.group_size, quote_name(op.strategy)));
  }
  if (!op.block.empty() && op.strategy != "block") {
    return fields.unsupported(fmt::format("block_structure: got [{}] with strategy {}, need block",
                                          fmt::join(op.block, ", "), quote_name(op.strategy)));
  }
  MOESAIC_RETURN_IF_ERROR(read_act_order(*json, fields, &op));
  return std::optional<CompressedOperand>(std::move(op));
}

}  // namespace moesaic::checkpoint
