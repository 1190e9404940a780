// Bytes of tensors that a program hands over one by one: what is kept, and what stays when a cut
// fails.
#include "checkpoint/container/pushed_tensors.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

using checkpoint::ByteRuns;

TEST(PushedTensors, AFailedCutLeavesTheWhole) {
  checkpoint::PushedTensors tensors("pushed");
  std::array<std::byte, 12> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i + 1);
  const checkpoint::TensorInfo* info =
      tensors.add("a", DType::kU8, {3, 4}, quant::GgufType::kNone).value();
  const std::array whole = {checkpoint::whole_tensor(*info)};
  ASSERT_TRUE(tensors.keep(*info, whole, bytes.data()).ok());
  const auto all = [&] {
    std::array<std::byte, 12> got{};
    const Status status = tensors.read_range(*info, 0, got);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return got;
  };
  // The first run is made, the second cannot be: as when memory ends between them.
  const std::array bad = {ByteRuns{0, 2, 4, 3}, ByteRuns{8, 8, 8, 1}};
  EXPECT_EQ(mismatch(tensors.cut(*info, bad), StatusCode::kInternal, {"\"a\"", "outside"}), "");
  EXPECT_TRUE(tensors.keeps_whole(*info));
  EXPECT_EQ(tensors.kept_bytes(), 12);
  EXPECT_EQ(all(), bytes);
  const std::array good = {ByteRuns{2, 2, 4, 3}};
  ASSERT_TRUE(tensors.cut(*info, good).ok());
  EXPECT_EQ(tensors.kept_bytes(), 6);
  std::array<std::byte, 2> got{};
  ASSERT_TRUE(tensors.read_range(*info, 6, got).ok());
  EXPECT_EQ(got, (std::array{bytes[6], bytes[7]}));
  EXPECT_EQ(tensors.read_range(*info, 0, got).code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace moesaic::test
