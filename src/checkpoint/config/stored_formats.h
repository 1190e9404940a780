// One row per stored format: all that differs between formats before their bytes are read. What
// reads those is the format's codec (reader/mlp_reader.cc). A new format is a row in each table.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "checkpoint/config/linear_format.h"
#include "checkpoint/config/linear_tensors.h"
#include "moesaic/dtype.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// What the sizes of a linear must be multiples of, and what those are, for messages.
struct SizeRule {
  std::int64_t rows = 1;
  std::string_view rows_are = "";
  std::int64_t columns = 1;
  std::string_view columns_are = "";
};

// The tensors of all experts of a layer in one, [E, N, K], where a format is stored so.
struct StackedForm {
  enum class Scale : std::uint8_t {
    kNone,       // the format is not stored so
    kOfLayout,   // the tensors' names and shapes are the layout's
    kPerExpert,  // one multiplier
    kPerRow,
    kPerGroup,  // of `group` columns of a row
  };
  Scale scale = Scale::kNone;
  bool transposed = false;  // also [E, K, N]
  DType weight = DType::kF8E4M3;
  std::int64_t codes_per_element = 1;
  std::vector<DType> scales = {DType::kF32, DType::kBF16, DType::kF16};
  std::int64_t group = 0;
  bool global_scale = false;  // and one of its own beside every input that is quantised
};

struct StoredFormatRow {
  StoredFormat format;
  std::string_view name;  // for messages
  Result<Scheme> (*scheme)(const LinearFormat&, DType dtype);
  SizeRule (*sizes)(const LinearFormat&);
  std::int64_t (*slice_unit)(const LinearFormat&);
  // Tensors of a linear [rows, columns]. Null: the layout names the tensors (plain, FP8 blocks, the
  // blocks of gpt-oss and of GGUF), see binding/layer_plan.cc.
  std::vector<LinearTensor> (*tensors)(const LinearFormat&, std::int64_t rows,
                                       std::int64_t columns);
  StackedForm (*stacked)(const LinearFormat&) = nullptr;  // null: not stored so
};
const StoredFormatRow& stored_format_row(StoredFormat format);

// The rows' schemes (format_schemes.cc) and tensors (linear_tensors.cc).
Result<Scheme> plain_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> fp8_block_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> fp8_tensor_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> fp8_channel_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> mxfp8_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> int8_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> nvfp4_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> mxfp4_blocks_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> mxfp4_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> integer_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> bnb4_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> bnb8_scheme(const LinearFormat& format, DType dtype);
Result<Scheme> gguf_scheme(const LinearFormat& format, DType dtype);
std::vector<LinearTensor> fp8_tensor_tensors(const LinearFormat& format, std::int64_t rows,
                                             std::int64_t columns);
std::vector<LinearTensor> fp8_channel_tensors(const LinearFormat& format, std::int64_t rows,
                                              std::int64_t columns);
std::vector<LinearTensor> mxfp8_tensors(const LinearFormat& format, std::int64_t rows,
                                        std::int64_t columns);
std::vector<LinearTensor> int8_tensors(const LinearFormat& format, std::int64_t rows,
                                       std::int64_t columns);
std::vector<LinearTensor> bnb8_tensors(const LinearFormat& format, std::int64_t rows,
                                       std::int64_t columns);
std::vector<LinearTensor> packed_tensors(const LinearFormat& format, std::int64_t rows,
                                         std::int64_t columns);
std::vector<LinearTensor> gptq_tensors(const LinearFormat& format, std::int64_t rows,
                                       std::int64_t columns);
std::vector<LinearTensor> awq_tensors(const LinearFormat& format, std::int64_t rows,
                                      std::int64_t columns);
std::vector<LinearTensor> nvfp4_tensors(const LinearFormat& format, std::int64_t rows,
                                        std::int64_t columns);
std::vector<LinearTensor> mxfp4_tensors(const LinearFormat& format, std::int64_t rows,
                                        std::int64_t columns);
std::vector<LinearTensor> bnb4_tensors(const LinearFormat& format, std::int64_t rows,
                                       std::int64_t columns);

}  // namespace moesaic::checkpoint
