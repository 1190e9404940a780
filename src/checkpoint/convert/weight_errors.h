// What a format leaves of the weights that are converted to it: each linear, and gate with up and down
// of all experts of a layer, judged by itself.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic::checkpoint {

// Of weights, relative: with more an output would have no bound (kLargestUsefulBound). No format that
// is written here errs more.
inline constexpr double kMostWeightError = 0.2;
// Of one linear, whose groups may have more outliers than the layer's. Values that become zeros, or the
// largest that there is, err by about 1.
inline constexpr double kMostLinearError = 0.5;

enum class WeightMatrix : std::uint8_t { kW13, kW2 };

// The errors of one layer.
class WeightErrors {
 public:
  // `format` is for messages.
  explicit WeightErrors(std::string_view format) : format_(format) {}

  // Of one linear, `w` in F32 and the values that its new tensors stand for. kUnsupported, naming the
  // linear and both figures, above kMostLinearError.
  Status add(WeightMatrix matrix, std::string_view linear, const ConstTensorView& w,
             const ConstTensorView& decoded);

  // |decoded - w| / |w| of all w13 or of all w2, the larger: an output errs with the worse one, however
  // small its values are beside the other's.
  double relative() const;
  // kUnsupported above kMostWeightError.
  Status check() const;

 private:
  struct Sums {
    double error = 0, size = 0;  // squares
    double relative() const;
  };
  Status refusal(std::string_view what, double rel, double most) const;

  std::string_view format_;
  std::array<Sums, 2> sums_;
};

}  // namespace moesaic::checkpoint
