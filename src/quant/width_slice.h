// Which part of an expert's width I a tensor-parallel rank holds: rows of gate and up, columns of
// down. What reads experts and what computes with them must agree about it.
// Source: docs/spec/checkpoints.md section 3.4 (gpt-oss), docs/spec/parallel.md section 1.
#pragma once

#include <cstdint>
#include <string_view>

#include "moesaic/parallel.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic::quant {

// Rows [first, first + count) of the width. The rank's experts have `padded` of them, the same
// number on every rank, zeros behind the first `count`.
struct WidthSlice {
  std::int64_t first = 0, count = 0, padded = 0;
  bool operator==(const WidthSlice&) const = default;
};

// Are experts of this stored scheme cut into shares that may differ? MXFP4 is: its groups of 32 must
// stay whole, and gpt-oss' width of 2880 holds 90 of them.
bool is_cut_unevenly(const Scheme& stored);

// The slice of rank `rank` of `parts`, in whole groups of `unit`.
//   even    width / parts each. kInvalidArgument names field, width and parts when that is no
//           whole number, or no multiple of `unit`
//   uneven  ceil(width / unit / parts) groups each, so that the last ranks have fewer or none;
//           kInvalidArgument when `width` is no multiple of `unit`
Result<WidthSlice> slice_width(std::string_view field, std::int64_t width, std::int64_t parts,
                               std::int64_t rank, std::int64_t unit, bool uneven);

// Ranks that have the same rows, and which of them this is: a shared expert that is cut has as many
// slices (RankOptions::cut_shared).
struct RowSharing {
  int ranks = 1, rank = 0;
};
RowSharing row_sharing(const ParallelConfig& parallel);

}  // namespace moesaic::quant
