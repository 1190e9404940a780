// Inputs that are not like normal data, for every scheme: one channel many times larger than the
// others, all of them scaled. What the error is, what bound is in force, what is reported. The
// second half of `moesaic accuracy`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "accuracy_case.h"
#include "moesaic/numerics.h"

namespace moesaic::tool {

struct SweepInput {
  std::string name;
  double outlier = 1;  // factor of one channel of every row
  double scale = 1;    // factor of everything
};
std::vector<SweepInput> sweep_inputs();

struct SweepScheme {
  std::string name;
  Scheme quant;
};
// Those of quant_schemes(), and FP8 with a static activation scale.
std::vector<SweepScheme> sweep_schemes();

struct SweepCell {
  double error = 0;   // relative L2 against fp32 with the same stored weights
  double stated = 0;  // the scheme's bound
  double bound = 0;   // the bound in force (numerics.h)
  NumericsSummary numerics;
  double activation_bound = 0;
  // The error is within the bound in force, or a word was said.
  bool honest() const;
};
// Static scales are those that `data` itself would have calibrated.
Result<SweepCell> measure_sweep(const AccuracyCase& data, const SweepScheme& scheme,
                                const SweepInput& input, int num_threads);

}  // namespace moesaic::tool
