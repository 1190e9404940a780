#include "checkpoint/tiny_support.h"

#include <stdexcept>

#include "checkpoint/generated_files.h"

namespace moesaic::test {

TempDir* TinyCheckpoints::folder_ = nullptr;
std::string TinyCheckpoints::problem_;
std::vector<TinyCase> TinyCheckpoints::cases_;

void TinyCheckpoints::SetUpTestSuite() {
  const std::string python = MOESAIC_PYTHON;
  if (python.empty()) return;
  folder_ = new TempDir();
  const auto files = generate_files(python, "make_tiny_checkpoints.py", *folder_);
  problem_ = files.problem;
  for (const auto& item : files.manifest) {
    TinyCase c;
    c.name = item["name"];
    c.directory = folder_->path(item["path"].get<std::string>());
    c.expected_file = folder_->path(c.name + ".expected.safetensors");
    c.layers = item["layers"].get<std::vector<int>>();
    c.prefix = item["prefix"];
    c.spec = item["spec"];
    cases_.push_back(std::move(c));
  }
}

void TinyCheckpoints::TearDownTestSuite() {
  delete folder_;
  folder_ = nullptr;
  cases_.clear();
}

void TinyCheckpoints::SetUp() {
  if (folder_ == nullptr) GTEST_SKIP() << "no Python 3 interpreter: tiny checkpoints not written";
  ASSERT_EQ(problem_, "");
  ASSERT_GE(cases_.size(), 30U);
}

const TinyCase& TinyCheckpoints::find(const std::string& name) {
  for (const TinyCase& c : cases_) {
    if (c.name == name) return c;
  }
  throw std::out_of_range("no tiny checkpoint called " + name);
}

Checkpoint must_open(const std::string& directory, FileAccess access) {
  Result<Checkpoint> checkpoint = Checkpoint::open(directory, {access});
  if (!checkpoint.ok()) throw std::runtime_error(checkpoint.status().to_string());
  return std::move(*checkpoint);
}

TensorFile must_open_file(const std::string& path) {
  Result<TensorFile> file = TensorFile::open(path);
  if (!file.ok()) throw std::runtime_error(file.status().to_string());
  return std::move(*file);
}

std::string sub_matrix(const Tensor& stacked, std::int64_t slab, std::int64_t first_row,
                       std::int64_t rows, std::int64_t first_col, std::int64_t cols) {
  const std::int64_t bits = dtype_bits(stacked.dtype());  // slices of 4-bit rows are whole bytes
  const std::int64_t all_rows = stacked.shape()[1];
  const std::int64_t all_cols = stacked.shape()[2];
  std::string out;
  for (std::int64_t r = first_row; r < first_row + rows; ++r) {
    const std::int64_t at = ((slab * all_rows + r) * all_cols + first_col) * bits / 8;
    out.append(reinterpret_cast<const char*>(stacked.data()) + at,
               static_cast<std::size_t>(cols * bits / 8));
  }
  return out;
}

std::string bytes_of(ConstTensorView view) {
  const std::int64_t bytes = contiguous_bytes(view.dtype, view.shape).value();
  return {reinterpret_cast<const char*>(view.data), static_cast<std::size_t>(bytes)};
}

}  // namespace moesaic::test
