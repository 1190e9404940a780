#include "layer/input_norm.h"

#include <cmath>
#include <cstdint>

#include "numerics/element.h"

namespace moesaic::layer {

void normalise_rows(const ConstTensorView& x, double eps, const float* weight, float* out) {
  const std::int64_t rows = x.dim(0);
  const std::int64_t hidden = x.dim(1);
  for (std::int64_t t = 0; t < rows; ++t) {
    float* const row = out + t * hidden;
    double squares = 0;
    for (std::int64_t h = 0; h < hidden; ++h) {
      row[h] = load_as_f32(x.data, x.dtype, t * x.strides[0] + h);
      squares += double{row[h]} * double{row[h]};
    }
    const double root = std::sqrt(squares / static_cast<double>(hidden) + eps);
    for (std::int64_t h = 0; h < hidden; ++h) {
      const double n = double{row[h]} / root;
      row[h] = static_cast<float>(weight == nullptr ? n : n * double{weight[h]});
    }
  }
}

}  // namespace moesaic::layer
