// Trained checkpoints with outputs computed in float64 from the stored weights.
#pragma once

#include <string>
#include <vector>

#include "moesaic/checkpoint.h"
#include "support/source_folder.h"

namespace moesaic::test {

// How to run the checkpoints: the error bound is on relative L2 against the golden output.
struct GoldenCase {
  std::string model, quant;
  double bound;
  bool is_extra = false;
  std::string folder() const { return is_extra ? extra_model(model) : bundled_model(model); }
};

// Input, output and choice of experts of one layer.
struct Golden {
  int layer = 0;
  Tensor input, output;
  Tensor ids;  // absent where the file has none
};
std::vector<Golden> read_golden(const Checkpoint& checkpoint, const std::string& folder);

// A copy of the first rows of a matrix.
Tensor first_rows(const Tensor& source, std::int64_t rows);

// EXPECT the same experts for every token; slot order of the golden files is not defined. Trained
// routers leave gaps far above fp32 rounding in these files: no near-tie to excuse.
void expect_same_choice(const Tensor& got, const Tensor& want);

}  // namespace moesaic::test
