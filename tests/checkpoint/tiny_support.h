// The tiny checkpoints that make_tiny_checkpoints.py writes, generated once per test program.
#pragma once

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/container_support.h"
#include "moesaic/checkpoint.h"

namespace moesaic::test {

struct TinyCase {
  std::string name, directory, expected_file;
  std::vector<int> layers;
  std::string prefix;  // with %d
  nlohmann::json spec;
};

// Skips (visibly) without a Python interpreter.
class TinyCheckpoints : public testing::Test {
 protected:
  static void SetUpTestSuite();
  static void TearDownTestSuite();
  void SetUp() override;
  static const std::vector<TinyCase>& cases() { return cases_; }
  static const TinyCase& find(const std::string& name);

 private:
  static TempDir* folder_;
  static std::string problem_;
  static std::vector<TinyCase> cases_;
};

// Opens and asserts in one step.
Checkpoint must_open(const std::string& directory, FileAccess access = FileAccess::kMmap);
TensorFile must_open_file(const std::string& path);

// Rows and columns of a [rows, cols] slab of bytes: what a tensor-parallel slice must contain.
std::string sub_matrix(const Tensor& stacked, std::int64_t slab, std::int64_t first_row,
                       std::int64_t rows, std::int64_t first_col, std::int64_t cols);
std::string bytes_of(ConstTensorView view);

}  // namespace moesaic::test
