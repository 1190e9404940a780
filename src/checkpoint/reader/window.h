// Where the numbers of one expert lie in the files: which part of which stored matrix becomes which
// rows of w13 and w2. The only place that knows fused, transposed and interleaved storages and the
// slices of tensor-parallel ranks; what the numbers mean is the codecs' (mlp_reader_impl.h).
// Source: docs/spec/checkpoints.md sections 3.4, 5 and 6.3.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/families.h"
#include "checkpoint/config/linear_format.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// What to read: rows [first, first + count) of gate and up, the same columns of down.
struct MlpSlice {
  LinearFormat format;  // of the files
  Scheme scheme;        // of what is read into
  ExpertStorage storage = ExpertStorage::kPerExpert;
  std::int64_t experts = 1;     // that stacked tensors hold
  bool scales_stacked = false;  // numbers of all experts in one tensor, whatever the storage
  bool gated = true;            // false: w13 is up alone, [count, H]
  std::int64_t hidden = 0;      // H
  std::int64_t width = 0;       // full I
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t padded = 0;  // rows of gate and up that the rank's experts have: zeros after `count`
  bool has_bias = false;
  bool with_down_bias = false;  // one tensor-parallel rank adds it, the others get zeros
};

// The part of one stored linear [rows_all, cols_all] that goes into rows [to, to + rows) of a
// matrix.
struct Window {
  Projection part;
  Projection projection;  // whose tensors hold it: kGate for an up that is fused with gate
  std::int64_t rows_all, cols_all;
  std::int64_t first_row, rows, first_col, cols;
  std::int64_t to;
  std::int64_t row_step = 1;  // 2: rows of gate and up take turns in the file
  bool transposed = false;    // the file's rows are columns of the linear
};
struct MlpWindows {
  Window gate, up, down;  // gate: of gated MLPs
};
MlpWindows windows_of(const MlpSlice& slice);

struct Rectangle {
  std::int64_t first_row = 0, rows = 0, first_col = 0, cols = 0;
  bool operator==(const Rectangle&) const = default;
};
// Columns of a linear that an element of a tensor of this kind stands for, for tensors that are read
// window by window; none for those that are read whole, or in a way of their own.
std::optional<std::int64_t> columns_per_element(StoredFormat format, TensorKind kind);

// What has to be read of a tensor of such elements for the window, with the rows that take turns
// with its own: a rectangle in rows of `row_elements`. `experts_before`: in a stacked tensor.
struct StoredPart {
  std::int64_t row_elements = 0;
  Rectangle part;
};
StoredPart part_of(const Window& w, std::int64_t columns_per_element, std::int64_t experts_before);

// A part of a stored tensor seen as a matrix with rows of `row_elements` (packed codes count as
// stored), each of which may be cut into several rows of the tensor. Errors of reading as they come.
Status read_rectangle(const ShardSet::Located& from, std::int64_t row_elements,
                      const Rectangle& part, std::byte* to);

// Rows and columns exchanged: to[r][c] = from[c][first + r * step], for `from` with rows of `pitch`
// elements of 1, 2 or 4 bytes and `to` [rows, cols].
void transpose_rows(const std::byte* from, std::int64_t element_bytes, std::int64_t pitch,
                    std::int64_t first, std::int64_t step, std::int64_t rows, std::int64_t cols,
                    std::byte* to);

}  // namespace moesaic::checkpoint
