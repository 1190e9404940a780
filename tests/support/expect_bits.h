// Expects two tensors to have the same bytes; the text says where they differ first.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "moesaic/tensor.h"
#include "support/metrics.h"

namespace moesaic::test {

inline void expect_same(const Tensor& got, const Tensor& want, const std::string& what) {
  std::string why;
  EXPECT_TRUE(same_bits(got.view(), want.view(), &why)) << what << ": " << why;
}

}  // namespace moesaic::test
