// How one expert is read (mlp_reader.h). Each stored format has a codec: what the numbers of a window
// mean. Codes that are stored as they are used (codecs_codes.cc); words and blocks
// (codecs_words.cc).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "checkpoint/reader/integer_linear.h"
#include "checkpoint/reader/mlp_reader.h"
#include "checkpoint/reader/value_checks.h"

namespace moesaic::checkpoint {

class MlpReader {
 public:
  MlpReader(const MlpTensors& tensors, const MlpSlice& slice, std::int64_t expert, MlpBuffers* out)
      : tensors_(tensors),
        slice_(slice),
        format_(slice.format),
        weight_(slice.scheme.weight),
        expert_(expert),
        out_(*out) {}

  Status run(const InputScales& input_scales);

 private:
  // A row of the table of formats: `read` takes one window of a linear, `finish` what is known once
  // all were read; null: nothing.
  struct Codec {
    StoredFormat format;
    Status (MlpReader::*read)(const Window&, MatrixBuffers*);
    void (MlpReader::*finish)();
  };
  static const std::array<Codec, kNumStoredFormats> kCodecs;

  const std::optional<ShardSet::Located>& stored(TensorKind kind, const Window& w) const {
    return tensors_.of(kind)[static_cast<std::size_t>(w.projection)];
  }
  std::string_view name(TensorKind kind, const Window& w) const {
    return stored(kind, w)->info->name;
  }
  Place place(TensorKind kind, const Window& w, std::int64_t column_unit) const {
    return {name(kind, w), w.first_row, w.first_col / column_unit, w.row_step};
  }

  // The tensor's part as it lies in the file, in a buffer of the kind.
  Result<const std::byte*> staged(TensorKind kind, std::int64_t row_elements, const Window& w,
                                  const Rectangle& part);
  // The window's elements row-major, of a kind with columns_per_element.
  Status read_elements(TensorKind kind, const Window& w, std::byte* to);
  Status read_bias(const Window& w, float* to) const;
  Status read_biases(const MlpWindows& windows);

  // codecs_codes.cc
  Status read_plain(const Window& w, MatrixBuffers* m);
  Status read_fp8_block(const Window& w, MatrixBuffers* m);
  Status read_fp8_tensor(const Window& w, MatrixBuffers* m);
  Status read_fp8_channel(const Window& w, MatrixBuffers* m);
  Status read_mxfp8(const Window& w, MatrixBuffers* m);
  Status read_mxfp4(const Window& w, MatrixBuffers* m);
  Status read_nvfp4(const Window& w, MatrixBuffers* m);
  Status read_int8(const Window& w, MatrixBuffers* m);
  Status read_bnb8(const Window& w, MatrixBuffers* m);
  Status read_fp8_codes(const Window& w, MatrixBuffers* m);
  std::uint8_t* rows_of(MatrixBuffers& m, const Window& w) const;
  // Experts before this one in the tensors that hold all of them.
  std::int64_t experts_before() const;
  // Experts before this one in the numbers that count for whole tensors.
  std::int64_t numbers_before() const;
  // bitsandbytes: the elements lie row by row.
  Status check_row_format(const Window& w) const;
  Status read_weight(const Window& w, MatrixBuffers* m);
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

  // codecs_words.cc
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
  void write_gguf_scales();
  // Scales (or minima, zeros where a type has none) of groups of `group` columns to groups of the
  // matrix's size, which divides it.
  Status spread(const Tensor& from, std::int64_t group, const Window& w, Tensor* to,
                std::string_view tensor_name) const;

  const MlpTensors& tensors_;
  const MlpSlice& slice_;
  const LinearFormat& format_;
  const OperandQuant& weight_;
  std::int64_t expert_;
  MlpBuffers& out_;
  std::array<float, 3> tensor_scales_{}, global_scales_{};
  std::vector<std::int32_t> row_order_;  // of gate and up, where w2's columns are reordered
};

}  // namespace moesaic::checkpoint
