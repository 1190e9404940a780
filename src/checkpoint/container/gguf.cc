#include "checkpoint/container/gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::uint32_t kMagic = 0x46554747;  // "GGUF", little-endian
constexpr std::uint32_t kMaxDims = 4;         // the format's own cap

// Numbers of the metadata value types.
enum ValueType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
  kNumValueTypes,
};

// Bytes of a value with a fixed size, 0 for strings and lists.
constexpr std::uint64_t fixed_bytes(std::uint32_t type) {
  constexpr std::array<std::uint8_t, kNumValueTypes> kBytes = {1, 1, 2, 2, 4, 4, 4,
                                                               1, 0, 0, 8, 8, 8};
  return type < kNumValueTypes ? kBytes[type] : 0;
}

bool has_bad_bytes(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20; });
}

class GgufParser {
 public:
  GgufParser(std::string_view label, const GgufBytes& bytes)
      : label_(label), bytes_(bytes), in_(bytes, label, kMaxGgufHeaderBytes) {}

  Result<GgufHeader> run() {
    MOESAIC_RETURN_IF_ERROR(preamble());
    MOESAIC_RETURN_IF_ERROR(metadata());
    MOESAIC_RETURN_IF_ERROR(alignment());
    MOESAIC_RETURN_IF_ERROR(tensors());
    MOESAIC_RETURN_IF_ERROR(data_section());
    return std::move(out_);
  }

 private:
  Status error(StatusCode code, std::string_view text) const {
    return {code, fmt::format("{}: {}", label_, text)};
  }
  Status corrupt(std::string_view text) const { return error(StatusCode::kCorruptFile, text); }

  Status preamble() {
    MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t magic, in_.u32("magic"));
    if (magic != kMagic) {
      return corrupt(fmt::format("magic: got 0x{:08x}, need \"GGUF\" (0x{:08x})", magic, kMagic));
    }
    MOESAIC_ASSIGN_OR_RETURN(out_.version, in_.u32("version"));
    if (out_.version == 1) {
      return error(StatusCode::kUnsupported, "version: got 1, need 2 or 3");
    }
    if (out_.version != 2 && out_.version != 3) {
      // The other byte order, or a writer of the future.
      const bool swapped = out_.version == 2U << 24 || out_.version == 3U << 24;
      const bool newer = out_.version > 3 && out_.version < 256;
      return error(swapped || newer ? StatusCode::kUnsupported : StatusCode::kCorruptFile,
                   fmt::format("version: got {}, need 2 or 3{}", out_.version,
                               swapped ? " (the file is big-endian)" : ""));
    }
    MOESAIC_ASSIGN_OR_RETURN(num_tensors_, in_.u64("tensor count"));
    MOESAIC_ASSIGN_OR_RETURN(num_entries_, in_.u64("metadata count"));
    // The shortest entry has 13 bytes, the shortest tensor info 32.
    MOESAIC_RETURN_IF_ERROR(count("metadata count", num_entries_, 13, kMaxGgufEntries));
    return count("tensor count", num_tensors_, 32, kMaxGgufTensors);
  }

  Status count(std::string_view what, std::uint64_t n, std::uint64_t bytes_each,
               std::uint64_t cap) const {
    if (n > in_.left() / bytes_each) {
      return corrupt(
          fmt::format("{}: got {}, which cannot fit into the {} bytes left", what, n, in_.left()));
    }
    if (n <= cap) return {};
    return error(StatusCode::kLimitExceeded,
                 fmt::format("{}: got {}, need at most {}", what, n, cap));
  }

  // --- metadata ---

  Status metadata() {
    for (std::uint64_t i = 0; i < num_entries_; ++i) {
      MOESAIC_ASSIGN_OR_RETURN(std::string key,
                               in_.string(fmt::format("metadata key {}", i), kMaxGgufKeyBytes));
      if (key.empty() || has_bad_bytes(key)) {
        return corrupt(
            fmt::format("metadata key {}: got {}, need a plain name", i, quote_name(key)));
      }
      const std::string what = "metadata " + quote_name(key);
      MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t type, in_.u32(what));
      MOESAIC_ASSIGN_OR_RETURN(GgufValue value, read_value(type, what));
      const bool fresh = out_.metadata.emplace(std::move(key), std::move(value)).second;
      if (!fresh && !MOESAIC_FAULT(gguf_allow_duplicate_keys)) {
        return corrupt(what + ": occurs twice");
      }
    }
    return {};
  }

  Result<double> read_float(std::uint32_t type, std::string_view what) {
    if (type == kFloat64) {
      MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t bits, in_.u64(what));
      return std::bit_cast<double>(bits);
    }
    MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t bits, in_.u32(what));
    return static_cast<double>(std::bit_cast<float>(bits));
  }

  Result<GgufValue> read_value(std::uint32_t type, std::string_view what) {
    if (type == kString) {
      MOESAIC_ASSIGN_OR_RETURN(std::string text, in_.string(what, kMaxGgufStringBytes));
      return GgufValue(std::move(text));
    }
    if (type == kArray) return read_array(what);
    if (type == kFloat32 || type == kFloat64) {
      MOESAIC_ASSIGN_OR_RETURN(const double number, read_float(type, what));
      return GgufValue(number);
    }
    MOESAIC_ASSIGN_OR_RETURN(const std::int64_t number, read_integer(type, what));
    if (type == kBool) return GgufValue(number != 0);
    return GgufValue(number);
  }

  Result<std::int64_t> read_integer(std::uint32_t type, std::string_view what) {
    switch (type) {
      case kUint8: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint8_t v, in_.u8(what));
        return std::int64_t{v};
      }
      case kInt8: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint8_t v, in_.u8(what));
        return std::int64_t{static_cast<std::int8_t>(v)};
      }
      case kBool: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint8_t v, in_.u8(what));
        if (v > 1) return corrupt(fmt::format("{}: got the bool {}, need 0 or 1", what, v));
        return std::int64_t{v};
      }
      case kUint16: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint16_t v, in_.u16(what));
        return std::int64_t{v};
      }
      case kInt16: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint16_t v, in_.u16(what));
        return std::int64_t{static_cast<std::int16_t>(v)};
      }
      case kUint32: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t v, in_.u32(what));
        return std::int64_t{v};
      }
      case kInt32: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t v, in_.u32(what));
        return std::int64_t{static_cast<std::int32_t>(v)};
      }
      case kUint64:
      case kInt64: {
        MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t v, in_.u64(what));
        if (type == kUint64 && v > std::numeric_limits<std::int64_t>::max()) {
          return error(StatusCode::kLimitExceeded,
                       fmt::format("{}: got {}, need less than 2^63", what, v));
        }
        return static_cast<std::int64_t>(v);
      }
      default:
        return corrupt(
            fmt::format("{}: value type: got {}, need 0 to {}", what, type, kNumValueTypes - 1));
    }
  }

  Result<GgufValue> read_array(std::string_view what) {
    MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t type, in_.u32(what));
    GgufArray array;
    MOESAIC_ASSIGN_OR_RETURN(array.count, in_.u64(what));
    if (type == kArray) {
      return error(StatusCode::kUnsupported,
                   fmt::format("{}: a list of lists is not supported", what));
    }
    if (type >= kNumValueTypes) {
      return corrupt(
          fmt::format("{}: element type: got {}, need 0 to {}", what, type, kNumValueTypes - 1));
    }
    const std::uint64_t least = type == kString ? 8 : fixed_bytes(type);
    if (array.count > in_.left() / least) {
      return corrupt(
          fmt::format("{}: got a list of {} elements, which cannot fit into the {} "
                      "bytes left",
                      what, array.count, in_.left()));
    }
    if (type == kString) {
      for (std::uint64_t i = 0; i < array.count; ++i) {
        MOESAIC_RETURN_IF_ERROR(in_.skip_string(what));
      }
      return GgufValue(std::move(array));
    }
    if (array.count > kMaxGgufList) {
      MOESAIC_RETURN_IF_ERROR(in_.skip(array.count * fixed_bytes(type), what));
      return GgufValue(std::move(array));
    }
    if (type == kFloat32 || type == kFloat64) {
      array.numbers.reserve(array.count);
      for (std::uint64_t i = 0; i < array.count; ++i) {
        MOESAIC_ASSIGN_OR_RETURN(const double value, read_float(type, what));
        array.numbers.push_back(value);
      }
      return GgufValue(std::move(array));
    }
    array.kept = true;
    array.integers.reserve(array.count);
    for (std::uint64_t i = 0; i < array.count; ++i) {
      MOESAIC_ASSIGN_OR_RETURN(const std::int64_t value, read_integer(type, what));
      array.integers.push_back(value);
    }
    return GgufValue(std::move(array));
  }

  Status alignment() {
    const auto it = out_.metadata.find("general.alignment");
    if (it == out_.metadata.end()) return {};
    const auto* value = std::get_if<std::int64_t>(&it->second);
    const bool sound = value != nullptr && *value > 0 &&
                       static_cast<std::uint64_t>(*value) <= kMaxGgufAlignment &&
                       (*value & (*value - 1)) == 0;
    if (!sound) {
      return corrupt(fmt::format(
          "metadata \"general.alignment\": got {}, need a power of two up to {}",
          value == nullptr ? std::string(gguf_kind_name(it->second)) : fmt::to_string(*value),
          kMaxGgufAlignment));
    }
    out_.alignment = static_cast<std::uint64_t>(*value);
    return {};
  }

  // --- tensors ---

  Status tensors() {
    out_.tensors.reserve(num_tensors_);
    std::uint64_t expected = 0;  // the reference writer lays tensors out without gaps
    for (std::uint64_t i = 0; i < num_tensors_; ++i) {
      MOESAIC_ASSIGN_OR_RETURN(std::string name,
                               in_.string(fmt::format("tensor {}: name", i), kMaxGgufNameBytes));
      if (name.empty() || has_bad_bytes(name)) {
        return corrupt(
            fmt::format("tensor {}: name: got {}, need a plain name", i, quote_name(name)));
      }
      MOESAIC_ASSIGN_OR_RETURN(TensorInfo info, tensor_info(std::move(name), expected));
      const std::optional<std::uint64_t> padded = checked_add_u64(info.end, out_.alignment - 1);
      if (!padded) return overflow(info.name);
      expected = *padded / out_.alignment * out_.alignment;
      out_.tensors.push_back(std::move(info));
    }
    std::set<std::string_view> seen;
    for (const TensorInfo& info : out_.tensors) {
      if (!seen.insert(info.name).second) {
        return corrupt(fmt::format("tensor {}: occurs twice", quote_name(info.name)));
      }
    }
    return {};
  }

  Status overflow(const std::string& name) const {
    return error(StatusCode::kLimitExceeded,
                 fmt::format("tensor {}: overflow: the size exceeds 63 bits", quote_name(name)));
  }

  Result<TensorInfo> tensor_info(std::string name, std::uint64_t expected) {
    const std::string what = "tensor " + quote_name(name);
    MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t rank, in_.u32(what + ": n_dims"));
    if (rank < 1 || rank > kMaxDims) {
      return corrupt(fmt::format("{}: n_dims: got {}, need 1 to {}", what, rank, kMaxDims));
    }
    std::array<std::int64_t, kMaxDims> dims{};
    std::int64_t elements = 1;
    for (std::uint32_t d = 0; d < rank; ++d) {
      MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t dim, in_.u64(what + ": dims"));
      if (dim > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return overflow(name);
      }
      // Outermost first, as everywhere else in this library.
      const std::uint32_t at = MOESAIC_FAULT(gguf_dims_in_file_order) ? d : rank - 1 - d;
      dims[at] = static_cast<std::int64_t>(dim);
      const auto product = checked_mul(elements, static_cast<std::int64_t>(dim));
      if (!product) return overflow(name);
      elements = *product;
    }
    MOESAIC_ASSIGN_OR_RETURN(const std::uint32_t id, in_.u32(what + ": type"));
    const std::optional<GgmlTypeInfo> type = find_ggml_type(id);
    if (!type) {
      return error(StatusCode::kUnsupported,
                   fmt::format("{}: type: got the number {}, which is not known", what, id));
    }
    MOESAIC_ASSIGN_OR_RETURN(const std::uint64_t offset, in_.u64(what + ": offset"));
    if (offset % out_.alignment != 0) {
      return corrupt(fmt::format("{}: offset: got {}, need a multiple of the alignment {}", what,
                                 offset, out_.alignment));
    }
    if (offset != expected && !MOESAIC_FAULT(gguf_skip_offset_check)) {
      return corrupt(
          fmt::format("{}: offset: got {}, need {} (tensors follow each other without "
                      "gaps or overlaps)",
                      what, offset, expected));
    }
    TensorInfo info;
    info.name = std::move(name);
    info.rank = static_cast<int>(rank);
    MOESAIC_RETURN_IF_ERROR(describe(*type, what, std::span(dims).first(rank), &info));
    const auto bytes = contiguous_bytes(info.dtype, info.shape);
    if (!bytes.ok()) return overflow(info.name);
    info.begin = offset;
    const auto end = checked_add_u64(offset, static_cast<std::uint64_t>(*bytes));
    if (!end || *end > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return overflow(info.name);
    }
    info.end = *end;
    return info;
  }

  // dtype, block_type and shape.
  Status describe(const GgmlTypeInfo& type, std::string_view what, std::span<std::int64_t> dims,
                  TensorInfo* info) const {
    std::int64_t& row = dims.back();
    if (const std::optional<DType> plain = plain_ggml_type(type.id)) info->dtype = *plain;
    if (type.block_elements > 1) {
      if (row % type.block_elements != 0) {
        return corrupt(
            fmt::format("{}: rows of {} elements: need a multiple of the {} elements of "
                        "a {} block",
                        what, row, type.block_elements, type.name));
      }
      const auto bytes = checked_mul(row / type.block_elements, type.block_bytes);
      if (!bytes) return overflow(info->name);
      row = *bytes;
      info->dtype = DType::kU8;
      info->block_type = static_cast<quant::GgufType>(type.id);
    }
    MOESAIC_ASSIGN_OR_RETURN(info->shape, Shape::from(dims));
    return {};
  }

  // The data must end with the last tensor: padded, as the reference writer leaves it, or not.
  Status data_section() {
    const std::uint64_t size = bytes_.size();
    const std::uint64_t header = in_.position();
    out_.data_offset = (header + out_.alignment - 1) / out_.alignment * out_.alignment;
    if (out_.tensors.empty()) {
      if (size <= out_.data_offset) return {};
      return corrupt(fmt::format("data: got {} bytes without a tensor", size - out_.data_offset));
    }
    // Tensors without elements need no byte of it, but it must begin within the file.
    if (size < out_.data_offset && !MOESAIC_FAULT(gguf_skip_file_size_check)) {
      return corrupt(fmt::format("data: got {} bytes of the file, need {} before the data", size,
                                 out_.data_offset));
    }
    const std::uint64_t data = size < out_.data_offset ? 0 : size - out_.data_offset;
    const std::uint64_t end = out_.tensors.back().end;  // below 2^63, offsets rise
    const std::uint64_t padded = (end + out_.alignment - 1) / out_.alignment * out_.alignment;
    if (data == end || data == padded || MOESAIC_FAULT(gguf_skip_file_size_check)) return {};
    return corrupt(fmt::format("data: got {} bytes, need {} (or {} with padding) for {} tensors",
                               data, end, padded, out_.tensors.size()));
  }

  std::string_view label_;
  GgufBytes bytes_;
  GgufReader in_;
  std::uint64_t num_tensors_ = 0;
  std::uint64_t num_entries_ = 0;
  GgufHeader out_;
};

}  // namespace

std::string_view gguf_kind_name(const GgufValue& value) {
  constexpr std::array<std::string_view, 5> kNames = {"an integer", "a number", "a bool",
                                                      "a string", "a list"};
  return kNames[value.index()];
}

Result<GgufHeader> parse_gguf(std::string_view label, const GgufBytes& bytes) {
  return guard_allocation(label, [&] { return GgufParser(label, bytes).run(); });
}

GgufFile::GgufFile(MappedFile file, GgufHeader header)
    : TensorDataFile(std::move(file), header.data_offset), header_(std::move(header)) {}

Result<GgufFile> GgufFile::open(const std::string& path, FileAccess access) {
  return guard_allocation(path, [&]() -> Result<GgufFile> {
    MOESAIC_ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path, access));
    MOESAIC_ASSIGN_OR_RETURN(GgufHeader header, parse_gguf(path, GgufBytes(file)));
    return GgufFile(std::move(file), std::move(header));
  });
}

bool has_gguf_magic(const std::string& path) {
  const Result<MappedFile> file = MappedFile::open(path, FileAccess::kCopy);
  std::array<std::byte, 4> first{};
  if (!file.ok() || file->size() < first.size() || !file->read_at(0, first).ok()) return false;
  return std::memcmp(first.data(), "GGUF", first.size()) == 0;
}

}  // namespace moesaic::checkpoint
