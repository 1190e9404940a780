// Parsing and validation of the header; reads no tensor data.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

#include "checkpoint/guard.h"
#include "checkpoint/json_strict.h"
#include "checkpoint/names.h"
#include "checkpoint/safetensors.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic {

// The state machine over the header's JSON events, then the checks between tensors.
class HeaderBuilder final : public JsonEvents {
 public:
  HeaderBuilder(std::string_view label, std::string_view header, std::uint64_t file_bytes)
      : label_(label), data_bytes_(file_bytes - 8 - header.size()) {
    out_.data_offset_ = 8 + header.size();
    // No entry is shorter than `"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}`, so this is an
    // upper bound on the number of tensors: the list never grows by copying, and pages that stay
    // unused are never touched.
    out_.tensors_.reserve(header.size() / kMinEntryBytes);
  }

  bool on_null() override { return other_scalar("null"); }
  bool on_bool(bool value) override { return other_scalar(value ? "true" : "false"); }
  bool on_negative(std::int64_t value) override {
    return other_scalar(value == 0 ? "-0" : fmt::format("{}", value));
  }
  bool on_real(double, std::string_view literal) override {
    return other_scalar(
        fmt::format("{}{}", literal.substr(0, 40), literal.size() > 40 ? "..." : ""));
  }
  bool on_unsigned(std::uint64_t value) override;
  bool on_string(std::string_view value) override;
  bool on_key(std::string_view key) override;
  bool on_start_object() override;
  bool on_end_object() override;
  bool on_start_array() override;
  bool on_end_array() override;

  const Status& status() const { return status_; }
  // After the last event: order, contiguity, duplicates, the data section's size.
  Result<SafetensorsHeader> finish();

 private:
  static constexpr std::size_t kMinEntryBytes = 49;

  // What the next event must be.
  enum class Want {
    kRoot,
    kTensorName,
    kTensorObject,
    kMetadataObject,
    kMetadataKey,
    kMetadataValue,
    kField,
    kDType,
    kShape,
    kShapeItem,
    kOffsets,
    kOffsetsItem,
    kUnknown,
    kEnd,
  };

  bool fail(StatusCode code, std::string_view text) {
    status_ = Status(code, fmt::format("{}: {}", label_, text));
    return false;
  }
  bool fail_tensor(StatusCode code, std::string_view text) {
    return fail(code, fmt::format("tensor {}: {}", quote_name(current_.name), text));
  }
  bool fail_unknown() { return fail_tensor(unknown_.code(), unknown_.reason()); }
  bool unexpected(std::string_view found);
  bool other_scalar(std::string_view found);
  void leave_unknown() {
    if (unknown_.done()) want_ = Want::kField;
  }
  bool seen_field(unsigned bit, std::string_view field);
  bool finish_entry();
  void sort_by_offset();
  Status check_names();
  Status check_offsets();

  std::string_view label_;
  std::uint64_t data_bytes_;
  SafetensorsHeader out_;
  Status status_;

  Want want_ = Want::kRoot;
  bool seen_metadata_ = false;
  std::string metadata_key_;
  TensorInfo current_;
  unsigned fields_ = 0;  // bits of the fields seen in the current entry
  std::uint64_t elements_ = 1;
  bool elements_overflow_ = false;
  std::array<std::int64_t, kMaxRank> dims_{};
  bool dim_overflow_ = false;
  int num_offsets_ = 0;
  UnknownJson unknown_;
};

bool HeaderBuilder::unexpected(std::string_view found) {
  switch (want_) {
    case Want::kTensorObject:
      return fail_tensor(StatusCode::kCorruptFile, fmt::format("got {}, need an object", found));
    case Want::kMetadataObject:
      return fail(StatusCode::kCorruptFile,
                  fmt::format("__metadata__: got {}, need an object of strings", found));
    case Want::kMetadataValue:
      return fail(StatusCode::kCorruptFile, fmt::format("__metadata__ {}: got {}, need a string",
                                                        quote_name(metadata_key_), found));
    case Want::kDType:
      return fail_tensor(StatusCode::kCorruptFile,
                         fmt::format("dtype: got {}, need a string", found));
    case Want::kShape:
    case Want::kShapeItem:
      return fail_tensor(
          StatusCode::kCorruptFile,
          fmt::format("shape: got {}, need an array of integers from 0 to 2^64-1", found));
    case Want::kOffsets:
    case Want::kOffsetsItem:
      return fail_tensor(
          StatusCode::kCorruptFile,
          fmt::format("data_offsets: got {}, need an array of two integers from 0 to 2^64-1",
                      found));
    default:
      return fail(StatusCode::kCorruptFile, fmt::format("header: got {}, need an object", found));
  }
}

bool HeaderBuilder::other_scalar(std::string_view found) {
  if (want_ != Want::kUnknown) return unexpected(found);
  leave_unknown();
  return true;
}

bool HeaderBuilder::on_unsigned(std::uint64_t value) {
  if (MOESAIC_FAULT(safetensors_integers_through_double)) {
    value = static_cast<std::uint64_t>(static_cast<double>(value >> 1)) << 1;
  }
  if (want_ == Want::kShapeItem) {
    const auto product = checked_mul_u64(elements_, value);
    elements_overflow_ = elements_overflow_ || !product;
    elements_ = product.value_or(0);
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      dim_overflow_ = true;
    } else if (current_.rank < kMaxRank) {
      dims_[static_cast<std::size_t>(current_.rank)] = static_cast<std::int64_t>(value);
    }
    ++current_.rank;  // an array of 2^31 items does not fit a header of 10^8 bytes
    return true;
  }
  if (want_ == Want::kOffsetsItem) {
    if (num_offsets_ == 2) {
      return fail_tensor(StatusCode::kCorruptFile,
                         "data_offsets: got more than 2 numbers, need exactly 2");
    }
    (num_offsets_++ == 0 ? current_.begin : current_.end) = value;
    return true;
  }
  return other_scalar(want_ == Want::kUnknown ? "" : fmt::format("{}", value));
}

bool HeaderBuilder::on_string(std::string_view value) {
  if (want_ == Want::kDType) {
    const auto dtype = dtype_from_name(value);
    if (!dtype) {
      return fail_tensor(StatusCode::kCorruptFile,
                         fmt::format("dtype: got {}, need a safetensors type name such as BF16",
                                     quote_name(value)));
    }
    current_.dtype = *dtype;
    want_ = Want::kField;
    return true;
  }
  if (want_ == Want::kMetadataValue) {
    out_.metadata_[metadata_key_] = value;
    want_ = Want::kMetadataKey;
    return true;
  }
  return other_scalar(want_ == Want::kUnknown ? "" : "string " + quote_name(value));
}

bool HeaderBuilder::seen_field(unsigned bit, std::string_view field) {
  if ((fields_ & bit) != 0) {
    return fail_tensor(StatusCode::kCorruptFile, fmt::format("duplicate key \"{}\"", field));
  }
  fields_ |= bit;
  return true;
}

bool HeaderBuilder::on_key(std::string_view key) {
  switch (want_) {
    case Want::kTensorName:
      if (key == "__metadata__") {
        if (seen_metadata_) return fail(StatusCode::kCorruptFile, "duplicate key \"__metadata__\"");
        seen_metadata_ = true;
        want_ = Want::kMetadataObject;
        return true;
      }
      if (key.empty()) return fail(StatusCode::kCorruptFile, "tensor name: got an empty name");
      if (key.find('\0') != std::string_view::npos) {
        return fail(StatusCode::kCorruptFile,
                    fmt::format("tensor name {}: contains a NUL character", quote_name(key)));
      }
      current_ = TensorInfo();
      current_.name = key;
      want_ = Want::kTensorObject;
      return true;
    case Want::kMetadataKey:
      if (out_.metadata_.find(key) != out_.metadata_.end()) {
        return fail(StatusCode::kCorruptFile,
                    fmt::format("__metadata__: duplicate key {}", quote_name(key)));
      }
      if (out_.metadata_.size() >= static_cast<std::size_t>(kMaxMetadataEntries)) {
        return fail(StatusCode::kLimitExceeded,
                    fmt::format("__metadata__: need at most {} entries", kMaxMetadataEntries));
      }
      metadata_key_ = key;
      want_ = Want::kMetadataValue;
      return true;
    case Want::kField:
      if (key == "dtype") {
        want_ = Want::kDType;
        return seen_field(1, key);
      }
      if (key == "shape") {
        want_ = Want::kShape;
        return seen_field(2, key);
      }
      if (key == "data_offsets") {
        want_ = Want::kOffsets;
        return seen_field(4, key);
      }
      want_ = Want::kUnknown;
      return unknown_.add_sibling(key) || fail_unknown();
    default:  // only inside an unknown value
      return unknown_.key(key) || fail_unknown();
  }
}

bool HeaderBuilder::on_start_object() {
  switch (want_) {
    case Want::kRoot:
      want_ = Want::kTensorName;
      return true;
    case Want::kTensorObject:
      want_ = Want::kField;
      fields_ = 0;
      elements_ = 1;
      elements_overflow_ = false;
      dim_overflow_ = false;
      num_offsets_ = 0;
      unknown_.reset_siblings();
      return true;
    case Want::kMetadataObject:
      want_ = Want::kMetadataKey;
      return true;
    case Want::kUnknown:
      return unknown_.start_object();
    default:
      return unexpected("an object");
  }
}

bool HeaderBuilder::on_end_object() {
  switch (want_) {
    case Want::kTensorName:
      want_ = Want::kEnd;
      return true;
    case Want::kField:
      want_ = Want::kTensorName;
      return finish_entry();
    case Want::kMetadataKey:
      want_ = Want::kTensorName;
      return true;
    default:
      unknown_.end_object();
      leave_unknown();
      return true;
  }
}

bool HeaderBuilder::on_start_array() {
  switch (want_) {
    case Want::kShape:
      want_ = Want::kShapeItem;
      return true;
    case Want::kOffsets:
      want_ = Want::kOffsetsItem;
      return true;
    case Want::kUnknown:
      return unknown_.start_array();
    default:
      return unexpected("an array");
  }
}

bool HeaderBuilder::on_end_array() {
  if (want_ == Want::kUnknown) {
    unknown_.end_array();
    leave_unknown();
    return true;
  }
  if (want_ == Want::kOffsetsItem && num_offsets_ != 2) {
    return fail_tensor(StatusCode::kCorruptFile,
                       fmt::format("data_offsets: got {} numbers, need exactly 2", num_offsets_));
  }
  want_ = Want::kField;
  return true;
}

// The checks that need only this entry. Everything is exact 64-bit arithmetic.
bool HeaderBuilder::finish_entry() {
  for (const auto& [bit, field] :
       {std::pair<unsigned, const char*>{1, "dtype"}, {2, "shape"}, {4, "data_offsets"}}) {
    if ((fields_ & bit) == 0) {
      return fail_tensor(StatusCode::kCorruptFile, fmt::format("{} is missing", field));
    }
  }
  TensorInfo& t = current_;
  if (t.end < t.begin) {
    return fail_tensor(
        StatusCode::kCorruptFile,
        fmt::format("data_offsets: got [{}, {}], need begin <= end", t.begin, t.end));
  }
  const auto bits_per_element = static_cast<std::uint64_t>(dtype_bits(t.dtype));
  const auto bits =
      elements_overflow_ ? std::nullopt : checked_mul_u64(elements_, bits_per_element);
  if (!bits) {
    return fail_tensor(StatusCode::kLimitExceeded,
                       fmt::format("shape: overflow: the {} of {} elements exceed 2^64-1",
                                   elements_overflow_ ? "number" : "bits", dtype_name(t.dtype)));
  }
  if (dim_overflow_) {
    return fail_tensor(StatusCode::kLimitExceeded, "shape: a dimension exceeds 2^63-1");
  }
  if (t.rank <= kMaxRank) {
    auto shape = Shape::from({dims_.data(), static_cast<std::size_t>(t.rank)});
    if (!shape.ok()) return fail_tensor(StatusCode::kInternal, shape.status().message());
    t.shape = *shape;
  }
  const std::string what =
      *bits % 8 == 0 && t.bytes() == *bits / 8
          ? std::string()  // building text for every good tensor would double the parse time
          : fmt::format(
                "{} {}", dtype_name(t.dtype),
                t.rank <= kMaxRank ? t.shape.to_string() : fmt::format("of rank {}", t.rank));
  if (*bits % 8 != 0) {
    return fail_tensor(StatusCode::kCorruptFile,
                       fmt::format("misaligned: {} is {} bits, need whole bytes", what, *bits));
  }
  if (!what.empty()) {
    return fail_tensor(StatusCode::kCorruptFile,
                       fmt::format("data_offsets: got [{}, {}] which is {} bytes, need {} for {}",
                                   t.begin, t.end, t.bytes(), *bits / 8, what));
  }
  out_.tensors_.push_back(std::move(t));
  return true;
}

// By (begin, end, order in the header), in place: positions are sorted, then the cycles followed.
void HeaderBuilder::sort_by_offset() {
  auto& tensors = out_.tensors_;
  const auto before = [](const TensorInfo& a, const TensorInfo& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  };
  if (std::is_sorted(tensors.begin(), tensors.end(), before)) return;
  std::vector<std::uint32_t> order(tensors.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (before(tensors[a], tensors[b])) return true;
    return !before(tensors[b], tensors[a]) && a < b;
  });
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    if (order[i] == i) continue;
    TensorInfo first = std::move(tensors[i]);
    std::uint32_t hole = i;
    while (order[hole] != i) {
      tensors[hole] = std::move(tensors[order[hole]]);
      hole = std::exchange(order[hole], hole);
    }
    tensors[hole] = std::move(first);
    order[hole] = hole;
  }
}

// Each tensor begins where the previous one ends and the last ends with the file: no holes, no
// overlap, no two tensors on the same bytes, nothing after the data.
Status HeaderBuilder::check_offsets() {
  std::uint64_t end = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& t : out_.tensors_) {
    if (t.begin != end && !MOESAIC_FAULT(safetensors_skip_offset_check)) {
      current_.name = t.name;
      if (t.begin < end) {
        fail_tensor(StatusCode::kCorruptFile,
                    fmt::format("data_offsets: got [{}, {}], need begin {}: overlaps tensor {}",
                                t.begin, t.end, end, quote_name(previous->name)));
      } else {
        fail_tensor(StatusCode::kCorruptFile,
                    fmt::format("data_offsets: got [{}, {}], need begin {}: a hole of {} bytes",
                                t.begin, t.end, end, t.begin - end));
      }
      return status_;
    }
    end = t.end;
    previous = &t;
  }
  if (end != data_bytes_ && !MOESAIC_FAULT(safetensors_skip_file_size_check)) {
    fail(StatusCode::kCorruptFile,
         fmt::format("incomplete buffer: got {} bytes of data, need {} ({})", data_bytes_, end,
                     data_bytes_ < end ? "the file is truncated" : "trailing bytes"));
    return status_;
  }
  return {};
}

// Sorting by a hash makes most comparisons one integer; equal hashes fall back to the names, so
// crafted collisions cost O(n log n) comparisons, not O(n^2).
Status HeaderBuilder::check_names() {
  const auto& tensors = out_.tensors_;
  auto& keys = out_.by_name_;
  keys.reserve(tensors.size());
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    keys.push_back({std::hash<std::string_view>{}(tensors[i].name), i});
  }
  std::sort(keys.begin(), keys.end(), [&](const auto& a, const auto& b) {
    if (a.hash != b.hash) return a.hash < b.hash;
    return tensors[a.index].name < tensors[b.index].name;
  });
  const auto same = std::adjacent_find(keys.begin(), keys.end(), [&](const auto& a, const auto& b) {
    return a.hash == b.hash && tensors[a.index].name == tensors[b.index].name;
  });
  if (same != keys.end() && !MOESAIC_FAULT(safetensors_allow_duplicate_names)) {
    fail(StatusCode::kCorruptFile,
         fmt::format("duplicate key {}", quote_name(tensors[same->index].name)));
  }
  return status_;
}

Result<SafetensorsHeader> HeaderBuilder::finish() {
  sort_by_offset();
  // Names first: a tensor listed twice usually overlaps itself, and the duplicate is the cause.
  MOESAIC_RETURN_IF_ERROR(check_names());
  MOESAIC_RETURN_IF_ERROR(check_offsets());
  return std::move(out_);
}

const TensorInfo* SafetensorsHeader::find(std::string_view name) const {
  const std::uint64_t hash = std::hash<std::string_view>{}(name);
  auto it = std::lower_bound(by_name_.begin(), by_name_.end(), hash,
                             [](const NameKey& key, std::uint64_t h) { return key.hash < h; });
  for (; it != by_name_.end() && it->hash == hash; ++it) {
    if (tensors_[it->index].name == name) return &tensors_[it->index];
  }
  return nullptr;
}

Result<std::uint64_t> safetensors_header_bytes(std::string_view label,
                                               std::span<const std::byte> first_bytes,
                                               std::uint64_t file_bytes) {
  if (file_bytes < 8 || first_bytes.size() < 8) {
    return Status(
        StatusCode::kCorruptFile,
        fmt::format("{}: header too small: got {} bytes, need at least 8", label, file_bytes));
  }
  std::uint64_t n = 0;
  for (std::size_t i = 8; i-- > 0;) n = n << 8 | static_cast<std::uint64_t>(first_bytes[i]);
  if (n > kMaxHeaderBytes) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("{}: header too large: got {} bytes, need at most {}", label, n,
                              kMaxHeaderBytes));
  }
  if (n > file_bytes - 8) {
    return Status(
        StatusCode::kCorruptFile,
        fmt::format(
            "{}: invalid header length: got {} bytes, need at most {} (the rest of the file)",
            label, n, file_bytes - 8));
  }
  return n;
}

Result<SafetensorsHeader> parse_safetensors_header(std::string_view label, std::string_view header,
                                                   std::uint64_t file_bytes) {
  return guard_allocation(label, [&]() -> Result<SafetensorsHeader> {
    const std::string header_label = fmt::format("{}: header", label);
    if (file_bytes < 8 || header.size() > file_bytes - 8) {
      return Status(StatusCode::kInternal, header_label + ": longer than the file");
    }
    if (const std::size_t bad = first_invalid_utf8(header); bad != header.size()) {
      return Status(StatusCode::kCorruptFile,
                    fmt::format("{}: not UTF-8: byte 0x{:02x} at position {}", header_label,
                                static_cast<unsigned char>(header[bad]), bad));
    }
    // Only this format's own padding may surround the object; JSON itself would allow more.
    if (header.empty() || header.front() != '{') {
      return Status(
          StatusCode::kCorruptFile,
          fmt::format("{}: not valid JSON: got {}, need '{{' as the first byte", header_label,
                      header.empty() ? "no bytes" : quote_name(header.substr(0, 1))));
    }
    const std::size_t last = header.find_last_not_of(' ');
    const std::string_view json = header.substr(0, last + 1);
    if (json.back() != '}') {
      return Status(
          StatusCode::kCorruptFile,
          fmt::format("{}: not valid JSON: ends with {}, need '}}' followed by spaces only",
                      header_label, quote_name(json.substr(json.size() - 1))));
    }
    HeaderBuilder builder(label, header, file_bytes);
    const JsonLimits limits{.max_bytes = kMaxHeaderBytes, .max_depth = kMaxHeaderDepth};
    MOESAIC_RETURN_IF_ERROR(parse_json_events(header_label, json, limits, builder));
    MOESAIC_RETURN_IF_ERROR(builder.status());
    return builder.finish();
  });
}

Result<SafetensorsHeader> parse_safetensors(std::string_view label,
                                            std::span<const std::byte> file) {
  MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t n,
                           safetensors_header_bytes(label, file, file.size()));
  const auto* text = reinterpret_cast<const char*>(file.data()) + 8;
  return parse_safetensors_header(label, {text, static_cast<std::size_t>(n)}, file.size());
}

}  // namespace moesaic
