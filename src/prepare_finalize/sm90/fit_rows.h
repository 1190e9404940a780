// Rows of one length to rows of another.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

struct FitRowsParams {
  const void* from = nullptr;  // [rows, from_columns]
  void* to = nullptr;          // [rows, to_columns]: the front of each row, or all and zeros behind
  std::int64_t rows = 0, from_columns = 0, to_columns = 0;
  int element_bytes = 2;  // or 4
};

// Returns a cudaError_t value. Capturable.
int launch_fit_rows(const FitRowsParams& params, void* stream);

}  // namespace moesaic::cuda
