// Scale-free comparison of results, and exact comparison with a useful message.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "moesaic/tensor.h"

namespace moesaic::test {

// Any float or integer tensor widened to double, in order.
std::vector<double> to_doubles(ConstTensorView t);

struct Comparison {
  double rel_l2 = 0;  // |got - want| / |want|
  double cosine = 0;
  double max_abs = 0;
  std::string describe;  // first worst coordinate, both values, whether got is all zero or has NaN
};
// Fails the comparison (rel_l2 = infinity) when sizes differ, want is all zero, or got has a
// non-finite value.
Comparison compare(std::span<const double> got, std::span<const double> want);

// Bytes equal? Otherwise the first differing element index and both values.
bool same_bits(ConstTensorView got, ConstTensorView want, std::string* why);

}  // namespace moesaic::test
