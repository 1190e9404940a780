// JSON events to tensor entries. What entries must satisfy is in header_checks.cc.
#include "checkpoint/container/header_builder.h"

#include <limits>

#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::checkpoint {

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

bool HeaderBuilder::take_unsigned(std::uint64_t value) {
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
  return JsonMembers::take_unsigned(value);
}

bool HeaderBuilder::take_string(std::string_view value) {
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
  return JsonMembers::take_string(value);
}

bool HeaderBuilder::seen_field(unsigned bit, std::string_view field) {
  if ((fields_ & bit) != 0) {
    return fail_tensor(StatusCode::kCorruptFile, fmt::format("duplicate key \"{}\"", field));
  }
  fields_ |= bit;
  return true;
}

bool HeaderBuilder::take_key(std::string_view key) {
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
      skip_value();
      return unknown_.add_sibling(key) || fail_unknown();
    default:  // keys come in objects, and those are all above
      return unexpected("a key");
  }
}

bool HeaderBuilder::start_object() {
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
    default:
      return unexpected("an object");
  }
}

bool HeaderBuilder::end_object() {
  switch (want_) {
    case Want::kTensorName:
      want_ = Want::kEnd;
      return true;
    case Want::kField:
      want_ = Want::kTensorName;
      return finish_entry();
    default:  // __metadata__
      want_ = Want::kTensorName;
      return true;
  }
}

bool HeaderBuilder::start_array() {
  switch (want_) {
    case Want::kShape:
      want_ = Want::kShapeItem;
      return true;
    case Want::kOffsets:
      want_ = Want::kOffsetsItem;
      return true;
    default:
      return unexpected("an array");
  }
}

bool HeaderBuilder::end_array() {
  if (want_ == Want::kOffsetsItem && num_offsets_ != 2) {
    return fail_tensor(StatusCode::kCorruptFile,
                       fmt::format("data_offsets: got {} numbers, need exactly 2", num_offsets_));
  }
  want_ = Want::kField;
  return true;
}

}  // namespace moesaic::checkpoint
