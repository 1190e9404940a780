#include "quant/compute_scheme.h"

#include <array>
#include <string_view>

#include "core/enum_rows.h"

namespace moesaic {
namespace {

struct ComputeRow {
  ComputeScheme kind;
  std::string_view name;
  std::optional<DType> activation_dtype = std::nullopt;
};

constexpr std::array<ComputeRow, 17> kComputeRows = {{
    {ComputeScheme::kF32, "f32"},
    {ComputeScheme::kBF16, "bf16", DType::kBF16},
    {ComputeScheme::kF16, "f16", DType::kF16},
    {ComputeScheme::kFp8Block, "fp8-block"},
    {ComputeScheme::kFp8AnyBlock, "fp8-any-block"},
    {ComputeScheme::kFp8Bf16, "fp8-bf16", DType::kBF16},
    {ComputeScheme::kMxfp4Bf16, "mxfp4-bf16", DType::kBF16},
    {ComputeScheme::kWeightOnly, "weight-only", DType::kBF16},
    {ComputeScheme::kFp8Scaled, "fp8-scaled"},
    {ComputeScheme::kMxfp8, "mxfp8"},
    {ComputeScheme::kMxfp4Fp8, "mxfp4-fp8"},
    {ComputeScheme::kMxfp4, "mxfp4"},
    {ComputeScheme::kNvfp4, "nvfp4"},
    {ComputeScheme::kInt4Fp8, "int4-fp8"},
    {ComputeScheme::kInt8, "int8"},
    {ComputeScheme::kInt8Group, "int8-group"},
    {ComputeScheme::kNone, "none"},
}};
static_assert(rows_follow_enum(kComputeRows, &ComputeRow::kind, ComputeScheme::kNone));

}  // namespace

std::string_view compute_scheme_name(ComputeScheme kind) {
  const ComputeRow* row = row_of_enum(kComputeRows, kind);
  return row == nullptr ? "unknown" : row->name;
}

}  // namespace moesaic

namespace moesaic::quant {

std::optional<DType> needed_activation_dtype(ComputeScheme kind) {
  const ComputeRow* row = row_of_enum(kComputeRows, kind);
  return row == nullptr ? std::nullopt : row->activation_dtype;
}

}  // namespace moesaic::quant
