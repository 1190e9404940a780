// Kernels of the general experts: a grouped GEMM that takes any shape, the quantisation of its rows,
// and the sum over a token's experts. Plain multiply-adds in fp32.
#pragma once

#include <cstdint>

#include "experts/cuda_general/row_values.h"
#include "experts/sm90/grouped_gemm.h"
#include "moesaic/dtype.h"
#include "permute/sm90/align.h"

namespace moesaic::cuda {

// Weight rows that a thread block multiplies: of a gated matrix 64 gate rows and their up rows.
inline constexpr int kGeneralTileRows = 128;
// Sums are folded every so many columns, which is also the width of a scale.
inline constexpr std::int64_t kGeneralChunk = 128;
// Token rows of a block.
inline constexpr int kFewRows = 8, kManyRows = 64;

// One of the two matrices of all local experts.
struct GeneralMatrix {
  const void* data = nullptr;  // [E_l, rows, stride], rows 16-byte aligned, zeros behind `columns`
  DType dtype = DType::kF32;   // F32, BF16, F16 or F8_E4M3
  std::int32_t rows = 0, columns = 0;
  std::int64_t stride = 0;       // elements
  const float* scale = nullptr;  // [E_l, scale_rows, scale_columns] per 128 x 128, or null
  std::int32_t scale_rows = 0, scale_columns = 0;
  const float* bias = nullptr;  // [E_l, rows], or null
};

// out = f(rows * weights^T + bias) for every row of the work list, by groups of rows_per_record
// rows. A product's bits depend on its row and its weights only: fp32 multiply-adds with ascending
// columns, folded every kGeneralChunk of them.
struct GeneralGemm {
  GeneralMatrix weights;
  // Where a row of the list reads: the row of its token, of its pair, or of its place in the list.
  enum class From : std::uint8_t { kToken, kPair, kList };
  From from = From::kToken;
  const void* x = nullptr;  // [.., columns]
  DType x_dtype = DType::kF32;
  DType round = DType::kF32;       // what values are rounded to before they are multiplied
  const float* factor = nullptr;   // by place in the list: x = round(x * round(factor)), or null
  const float* x_scale = nullptr;  // of e4m3 codes, [ceil(columns / 128)][x_scale_stride], or null
  std::int64_t x_scale_stride = 0;
  // The work list.
  const GroupRecord* groups = nullptr;
  const std::uint32_t* num_groups = nullptr;
  const std::int32_t* pair_of_row = nullptr;
  std::int32_t max_groups = 0, rows_per_record = kManyRows, top_k = 1;
  // The result. With an activation: [.., rows or rows / 2] by place in the list; else [.., rows] by
  // pair, times `weight`.
  bool activates = false, gated = false;
  GroupedActivation activation = {};
  const float* weight = nullptr;  // by place in the list, or null: 1
  void* out = nullptr;
  DType out_dtype = DType::kF32;  // F32, BF16 or F16
};
// All return cudaError_t values and can be captured.
int launch_general_gemm(const GeneralGemm& params, void* stream);

// e4m3 codes and a scale per 128 columns, as launch_quant_rows makes them, of any rows.
struct GeneralQuant {
  const void* x = nullptr;  // [.., columns]: row r reads x's row r / share
  DType x_dtype = DType::kF32;
  DType round = DType::kBF16;
  const float* factor = nullptr;  // [rows]: x = round(x * round(factor)), or null
  std::int64_t rows = 0, columns = 0, share = 1;
  // Batched format, or null: rows are the first *num_rows of the list, row r being row_of[r] (null:
  // r itself) of `x` and of the result.
  const std::uint32_t* num_rows = nullptr;
  const std::int32_t* row_of = nullptr;
  bool power_of_two_scales = false;
  std::uint8_t* codes = nullptr;  // [rows, columns]
  float* scale = nullptr;         // [ceil(columns / 128)][scale_stride]
  std::int64_t scale_stride = 0;
};
int launch_general_quant(const GeneralQuant& params, void* stream);

// Rows of every other quantised format, as the values that their codes stand for (row_values.h).
struct GeneralValues {
  ValueRule rule;
  const void* x = nullptr;  // [.., columns]: item i reads x's row i / share, or its place's
  DType x_dtype = DType::kF32;
  DType round = DType::kBF16;
  const float* factor = nullptr;  // [items]: x = round(x * round(factor)), or null
  std::int64_t items = 0, columns = 0, share = 1;
  // Items are pairs: those without an expert here have a negative entry and get no row; by_place:
  // the others read and write the row of that entry. Null: items are tokens.
  const std::int32_t* row_of_pair = nullptr;
  bool by_place = false;
  // Batched format, or null: items are the first *num_rows of the list, item r being row row_of[r] of
  // slabs of slab_rows; by_place: row r itself.
  const std::uint32_t* num_rows = nullptr;
  const std::int32_t* row_of = nullptr;
  std::int64_t slab_rows = 0;
  // Of a pair's expert, or null: its stored scale [experts], and where the activation of each column
  // of its weights is [experts, columns].
  const float* fixed = nullptr;
  const std::int32_t* perm = nullptr;
  const std::int32_t* topk_ids = nullptr;    // [items]
  const std::int32_t* expert_map = nullptr;  // of all experts, or null: identity
  float* values = nullptr;                   // [items, columns]
};
int launch_general_values(const GeneralValues& params, void* stream);

// Sums of the weighted rows of a token in slot order, in fp32; then the shared row.
struct GeneralCombine {
  const float* y = nullptr;                   // [tokens * top_k, hidden]
  const std::int32_t* row_of_pair = nullptr;  // negative: the slot has no expert here
  const std::uint16_t* shared = nullptr;      // [tokens, hidden] bf16, or null; may be `output`
  std::int64_t tokens = 0, hidden = 0;
  std::int32_t top_k = 1;
  void* output = nullptr;
  DType dtype = DType::kF32;  // F32, BF16 or F16
};
int launch_general_combine(const GeneralCombine& params, void* stream);

}  // namespace moesaic::cuda
