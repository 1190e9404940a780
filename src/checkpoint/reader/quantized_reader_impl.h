// How one quantised expert is read (reader/quantized_reader.h); its parts are in two files: codes
// that are stored as they are used (quantized_reader.cc), words and blocks (quantized_words.cc).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "checkpoint/reader/integer_linear.h"
#include "checkpoint/reader/quantized_reader.h"
#include "checkpoint/reader/value_checks.h"

namespace moesaic {

// The part of one stored linear [rows_all, cols_all] that goes into rows [to, to + rows) of a
// matrix.
struct Window {
  Projection part;
  Projection projection;  // whose tensors hold it: kGate for an up that is fused with gate
  std::int64_t rows_all, cols_all;
  std::int64_t first_row, rows, first_col, cols;
  std::int64_t to;
  std::int64_t row_step = 1;  // 2: rows of gate and up take turns in the file
};

// Rows and columns of a stored matrix; packed columns count as stored.
inline Status read_rectangle(const ShardSet::Located& from, std::int64_t first_row,
                             std::int64_t rows, std::int64_t first_col, std::int64_t cols,
                             std::byte* dst) {
  const auto bytes = static_cast<std::size_t>(rows * cols * dtype_bits(from.info->dtype) / 8);
  return from.file->read_rows(*from.info, first_row, rows, first_col, cols, {dst, bytes});
}

class QuantizedReader {
 public:
  QuantizedReader(const MlpTensors& tensors, const QuantizedSlice& slice, std::int64_t expert,
                  QuantizedBuffers* out)
      : tensors_(tensors),
        slice_(slice),
        format_(slice.format),
        weight_(slice.scheme.weight),
        expert_(expert),
        out_(*out) {}

  Status run(const InputScales& input_scales);

 private:
  const std::optional<ShardSet::Located>& stored(TensorKind kind, const Window& w) const {
    return tensors_.of(kind)[static_cast<std::size_t>(w.projection)];
  }
  std::string_view name(TensorKind kind, const Window& w) const {
    return stored(kind, w)->info->name;
  }
  Place place(TensorKind kind, const Window& w, std::int64_t column_unit) const {
    return {name(kind, w), w.first_row, w.first_col / column_unit, w.row_step};
  }

  Status read(const Window& w, MatrixBuffers* m);
  std::uint8_t* rows_of(MatrixBuffers& m, const Window& w) const;
  // Experts before this one in the tensors that hold all of them.
  std::int64_t experts_before() const;
  // Experts before this one in the numbers that count for whole tensors.
  std::int64_t numbers_before() const;
  // bitsandbytes: the elements lie row by row.
  Status check_row_format(const Window& w) const;
  // Bytes that stand for `unit` columns each, of the window's rows.
  Status read_bytes(TensorKind kind, const Window& w, std::int64_t unit, std::uint8_t* to);
  Status read_weight(const Window& w, std::int64_t codes_per_byte, MatrixBuffers* m);
  // A number that counts for a whole tensor: one for all experts, or each expert's own, or two of
  // each where gate and up are fused.
  Result<float> read_number(TensorKind kind, const Window& w) const;
  Status read_tensor_scale(const Window& w, MatrixBuffers* m);
  // One multiplier per row, [N] or [N, 1] (stacked: with E before it); the rows of w2 are never
  // cut.
  Status read_row_scales(const Window& w, std::uint8_t magnitude, MatrixBuffers* m);
  std::uint8_t* scale_rows(MatrixBuffers& m, const Window& w) const;
  Status read_group_bytes(const Window& w, MatrixBuffers* m);
  Status read_exponents(const Window& w, MatrixBuffers* m);
  // NVFP4 block scales: e4m3, never negative.
  Status read_e4m3_scales(const Window& w, MatrixBuffers* m);
  Status read_global_scale(const Window& w);
  // One per matrix, or, where gate and up of some expert differ, one per row: nothing is rounded
  // a second time.
  void write_tensor_scales();
  // A number of each projection to all of its rows.
  void write_rows(const std::array<float, 3>& numbers, std::size_t up, Tensor* w13, Tensor* w2);
  // One per matrix, or, where gate and up of some expert differ, one per row.
  void write_global_scales();

  // quantized_words.cc
  Status read_integers(const Window& w, MatrixBuffers* m);
  Status write_perm(const IntegerLinear& linear, const Window& w, MatrixBuffers* m);
  Status write_scales(const Window& w, const std::vector<float>& scales, std::int64_t groups,
                      MatrixBuffers* m);
  // One code per byte to the matrix's own width.
  Status write_codes(ConstTensorView codes, int bias, const Window& w, MatrixBuffers* m);
  Status read_bnb4(const Window& w, MatrixBuffers* m);
  Status read_gguf(const Window& w, MatrixBuffers* m);
  // The second level of NVFP4 that llama.cpp's converter writes beside the blocks; 1 where none is.
  Result<float> read_gguf_scale(const Window& w) const;
  // Scales (or minima, zeros where a type has none) of groups of `group` columns to groups of the
  // matrix's size, which divides it.
  Status spread(const Tensor& from, std::int64_t group, const Window& w, Tensor* to,
                std::string_view tensor_name) const;

  const MlpTensors& tensors_;
  const QuantizedSlice& slice_;
  const LinearFormat& format_;
  const OperandQuant& weight_;
  std::int64_t expert_;
  QuantizedBuffers& out_;
  std::array<float, 3> tensor_scales_{}, global_scales_{};
  std::vector<std::int32_t> row_order_;  // of gate and up, where w2's columns are reordered
};

}  // namespace moesaic
