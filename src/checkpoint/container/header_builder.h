// Internal to the safetensors header reader: the state machine over the JSON events, and the
// checks.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/container/json_members.h"
#include "checkpoint/container/safetensors.h"

namespace moesaic::checkpoint {

// The state machine over the header's JSON events, then the checks between tensors.
class HeaderBuilder final : public JsonMembers {
 public:
  HeaderBuilder(std::string_view label, std::string_view header, std::uint64_t file_bytes)
      : JsonMembers(label), data_bytes_(file_bytes - 8 - header.size()) {
    out_.data_offset_ = 8 + header.size();
    // No entry is shorter than `"":{"dtype":"U8","shape":[],"data_offsets":[0,1]}`, so this is an
    // upper bound on the number of tensors: the list never grows by copying, and pages that stay
    // unused are never touched.
    out_.tensors_.reserve(header.size() / kMinEntryBytes);
  }

  // After the last event: order, contiguity, duplicates, the data section's size.
  Result<SafetensorsHeader> finish();

 private:
  bool take_unsigned(std::uint64_t value) override;
  bool take_string(std::string_view value) override;
  bool take_key(std::string_view key) override;
  bool start_object() override;
  bool end_object() override;
  bool start_array() override;
  bool end_array() override;
  bool unexpected(std::string_view found) override;
  bool fail_unknown() override { return fail_tensor(unknown_.code(), unknown_.reason()); }

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
    kEnd,
  };

  bool fail_tensor(StatusCode code, std::string_view text) {
    return fail(code, fmt::format("tensor {}: {}", quote_name(current_.name), text));
  }
  bool seen_field(unsigned bit, std::string_view field);
  bool finish_entry();
  void sort_by_offset();
  Status check_names();
  Status check_offsets();

  std::uint64_t data_bytes_;
  SafetensorsHeader out_;

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
};

}  // namespace moesaic::checkpoint
