// Where each tensor of a safetensors file lies and the header that says so: what the whole-file
// writer and the streaming writer share. No files are touched here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moesaic/dtype.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
};

struct SafetensorsLayout {
  struct Place {
    std::size_t tensor;  // index of the argument
    std::uint64_t begin, bytes;
  };
  std::vector<Place> places;  // in the order of the file: wider types first, then by name
  std::string header;         // the 8 length bytes and the padded JSON
  std::uint64_t data_bytes = 0;
};

// kInvalidArgument for duplicate, empty, reserved or non-UTF-8 names and for element types that
// files do not have, kLimitExceeded for a header above 10^8 bytes or data beyond 2^63 - 1. The
// bytes depend on the arguments only. O(n log n).
Result<SafetensorsLayout> layout_safetensors(
    std::span<const TensorSpec> tensors,
    std::span<const std::pair<std::string, std::string>> metadata = {});

}  // namespace moesaic::checkpoint
