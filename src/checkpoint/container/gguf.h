// Strict reader of one GGUF file (versions 2 and 3, little-endian). The header is parsed once into
// an immutable, validated index of metadata and tensors; nothing here interprets tensor values.
// Layout: "GGUF", u32 version, u64 tensors, u64 metadata entries, the entries, the tensor infos,
// padding to general.alignment, data. Source: docs/spec/quantization.md section 13.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "checkpoint/container/gguf_reader.h"
#include "checkpoint/container/tensor_data_file.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

inline constexpr std::uint64_t kMaxGgufHeaderBytes = std::uint64_t{1} << 28;  // vocabularies: 20 MB
inline constexpr std::uint64_t kMaxGgufTensors = 1 << 20;  // far above what exists
inline constexpr std::uint64_t kMaxGgufEntries = 1 << 16;
inline constexpr std::uint64_t kMaxGgufKeyBytes = 65535;       // the format's own cap
inline constexpr std::uint64_t kMaxGgufNameBytes = 1024;       // the reference reader allows 63
inline constexpr std::uint64_t kMaxGgufStringBytes = 1 << 24;  // chat templates: 50 kB
inline constexpr std::uint64_t kMaxGgufAlignment = 1 << 20;

// A list, of which only numbers (among the integers bool) up to kMaxGgufList entries are kept: those
// are one value per layer. Vocabularies are walked over.
struct GgufArray {
  std::uint64_t count = 0;
  std::vector<std::int64_t> integers;
  std::vector<double> numbers;  // of a list of floats
  bool kept = false;            // integers are all of the list
};
inline constexpr std::uint64_t kMaxGgufList = 65536;

// Integers of every width, floats of both, bool, string, list. u64 above 2^63-1 is kLimitExceeded.
using GgufValue = std::variant<std::int64_t, double, bool, std::string, GgufArray>;
std::string_view gguf_kind_name(const GgufValue& value);  // "an integer"

struct GgufHeader {
  std::uint32_t version = 0;
  std::map<std::string, GgufValue, std::less<>> metadata;
  // In file order; begin and end relative to the data section. Dimensions outermost first (the
  // file has them fastest first).
  std::vector<TensorInfo> tensors;
  std::uint64_t alignment = 32;
  std::uint64_t data_offset = 0;
};

// Parses and validates a header. kCorruptFile: bad magic, no version, lengths beyond the file,
// unknown value types, duplicate keys or names, offsets that are not the running sum of padded
// sizes, data that does not end with the last tensor (padded or not). kLimitExceeded: the caps
// above, sizes beyond 63 bits. kUnsupported: big-endian files, other versions, nested lists, tensor
// types that are not in the table. Messages name the file, the key or tensor, the value found and
// the value needed.
Result<GgufHeader> parse_gguf(std::string_view label, const GgufBytes& bytes);

// An open file with its header. Movable; TensorInfo pointers stay valid. Reads are thread-safe.
class GgufFile : public TensorDataFile {
 public:
  static Result<GgufFile> open(const std::string& path, FileAccess access);
  std::span<const TensorInfo> tensors() const { return header_.tensors; }
  const GgufHeader& header() const { return header_; }

 private:
  GgufFile(MappedFile file, GgufHeader header);
  GgufHeader header_;
};

// Whether the file begins with the four bytes "GGUF". False for files that cannot be read.
bool has_gguf_magic(const std::string& path);

}  // namespace moesaic::checkpoint
