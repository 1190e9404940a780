#include "checkpoint/container/safetensors_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/safetensors.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

using Place = SafetensorsLayout::Place;

Status name_error(std::string_view what, std::string_view name, std::string_view text) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{} {}: {}", what, quote_name(name), text));
}

// A JSON string literal exactly as compact writers emit it (non-ASCII characters stay as they are).
std::string json_string(std::string_view text) { return nlohmann::json(text).dump(); }

Status check_name(std::string_view what, std::string_view name) {
  if (first_invalid_utf8(name) != name.size()) return name_error(what, name, "is not UTF-8");
  return {};
}

// Validates and sorts: descending dtype (wider first, so that data stays naturally aligned), then
// name.
Status place(std::span<const TensorSpec> tensors, std::vector<Place>* placed) {
  placed->reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorSpec& t = tensors[i];
    if (t.name.empty()) return {StatusCode::kInvalidArgument, "tensor name: is empty"};
    if (t.name == "__metadata__") return name_error("tensor name", t.name, "is reserved");
    if (t.name.find('\0') != std::string::npos) {
      return name_error("tensor name", t.name, "contains a NUL character");
    }
    MOESAIC_RETURN_IF_ERROR(check_name("tensor name", t.name));
    if (!dtype_from_name(dtype_name(t.dtype))) {
      return name_error(
          "tensor", t.name,
          fmt::format("has elements of {}, which files do not have", dtype_name(t.dtype)));
    }
    auto bytes = contiguous_bytes(t.dtype, t.shape);
    if (!bytes.ok()) return bytes.status().with_context(quote_name(t.name));
    placed->push_back({i, 0, static_cast<std::uint64_t>(*bytes)});
  }
  const bool keep_order = MOESAIC_FAULT(writer_keeps_argument_order);
  if (!keep_order) {
    std::sort(placed->begin(), placed->end(), [&](const Place& a, const Place& b) {
      const TensorSpec& x = tensors[a.tensor];
      const TensorSpec& y = tensors[b.tensor];
      return x.dtype != y.dtype ? x.dtype > y.dtype : x.name < y.name;
    });
  }
  // Names may repeat across types, so look for duplicates in an order of their own.
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorSpec& t : tensors) names.push_back(t.name);
  std::sort(names.begin(), names.end());
  const auto same = std::adjacent_find(names.begin(), names.end());
  if (same != names.end()) return name_error("tensor name", *same, "is given twice");
  return {};
}

Status append_metadata(std::span<const std::pair<std::string, std::string>> metadata,
                       std::string* json) {
  if (metadata.empty()) return {};
  std::vector<std::pair<std::string, std::string>> sorted(metadata.begin(), metadata.end());
  std::sort(sorted.begin(), sorted.end());
  *json += "\"__metadata__\":{";
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    MOESAIC_RETURN_IF_ERROR(check_name("metadata key", sorted[i].first));
    MOESAIC_RETURN_IF_ERROR(check_name("metadata value", sorted[i].second));
    if (i > 0 && sorted[i].first == sorted[i - 1].first) {
      return name_error("metadata key", sorted[i].first, "is given twice");
    }
    if (i > 0) *json += ',';
    *json += json_string(sorted[i].first);
    *json += ':';
    *json += json_string(sorted[i].second);
  }
  *json += "}";
  return {};
}

}  // namespace

Result<SafetensorsLayout> layout_safetensors(
    std::span<const TensorSpec> tensors,
    std::span<const std::pair<std::string, std::string>> metadata) {
  SafetensorsLayout layout;
  MOESAIC_RETURN_IF_ERROR(place(tensors, &layout.places));
  std::string json = "{";
  MOESAIC_RETURN_IF_ERROR(append_metadata(metadata, &json));
  for (Place& p : layout.places) {
    const TensorSpec& t = tensors[p.tensor];
    p.begin = layout.data_bytes;
    const auto end = checked_add_u64(p.begin, p.bytes);
    if (!end || *end > static_cast<std::uint64_t>(INT64_MAX) - kMaxHeaderBytes - 8) {
      return Status(StatusCode::kLimitExceeded, "the tensors together exceed 2^63-1 bytes");
    }
    std::string shape;
    for (const std::int64_t d : t.shape.dims()) {
      shape += fmt::format("{}{}", shape.empty() ? "" : ",", d);
    }
    json += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                        json.size() > 1 ? "," : "", json_string(t.name), dtype_name(t.dtype), shape,
                        p.begin, *end);
    layout.data_bytes = *end;
  }
  json += "}";
  json.append((8 - json.size() % 8) % 8, ' ');
  if (json.size() > kMaxHeaderBytes) {
    return Status(StatusCode::kLimitExceeded, fmt::format("header: got {} bytes, need at most {}",
                                                          json.size(), kMaxHeaderBytes));
  }
  for (unsigned i = 0; i < 8; ++i) {
    layout.header += static_cast<char>(json.size() >> (8 * i) & 0xFF);
  }
  layout.header += json;
  return layout;
}

}  // namespace moesaic::checkpoint
