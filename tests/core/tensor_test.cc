#include "moesaic/tensor.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/checked.h"
#include "moesaic/log.h"

namespace moesaic {
namespace {

TEST(Status, ContextIsSaidOnce) {
  const Status status(StatusCode::kIo, "a: cannot open");
  EXPECT_EQ(status.with_context("a").message(), "a: cannot open");
  EXPECT_EQ(status.with_context("b").with_context("b").message(), "b: a: cannot open");
  EXPECT_TRUE(Status().with_context("a").ok());
}

// "return {};" in a caller's class: success without a value would pass for a whole one.
TEST(Result, OfAnOkStatusIsAFailure) {
  const Result<int> nothing = Status();
  EXPECT_FALSE(nothing.ok());
  EXPECT_EQ(nothing.status().code(), StatusCode::kInternal);
  const auto passed_on = [&]() -> Status {
    MOESAIC_ASSIGN_OR_RETURN(const int value, Result<int>(nothing));
    return value == 0 ? Status() : Status(StatusCode::kIo, "another");
  };
  EXPECT_EQ(passed_on().code(), StatusCode::kInternal);
}

TEST(Shape, CountsElementsExactlyAndRefusesOverflow) {
  EXPECT_EQ(Shape({2, 3, 4}).num_elements().value(), 24);
  EXPECT_EQ(Shape({}).num_elements().value(), 1);
  EXPECT_EQ(Shape({0, 5}).num_elements().value(), 0);
  const auto n = Shape({std::int64_t{1} << 32, std::int64_t{1} << 31}).num_elements();
  ASSERT_FALSE(n.ok());
  EXPECT_EQ(n.status().code(), StatusCode::kLimitExceeded);
}

TEST(Shape, OfMoreDimensionsThanThereAreIsRefused) {
  const Shape shape{1, 2, 3, 4, 5, 6};
  EXPECT_EQ(shape.to_string(), "[-1]");
  EXPECT_EQ(shape.num_elements().status().code(), StatusCode::kInvalidShape);
  EXPECT_EQ(Tensor::zeros(DType::kF32, shape).status().code(), StatusCode::kInvalidShape);
  EXPECT_EQ(Shape({1, 2, 3, 4, 5}).num_elements().value(), 120);
}

TEST(Tensor, BytesOfSubByteTypesMustFillBytes) {
  EXPECT_EQ(contiguous_bytes(DType::kF4E2M1, Shape({2, 2})).value(), 2);
  EXPECT_EQ(contiguous_bytes(DType::kF6E2M3, Shape({4})).value(), 3);
  EXPECT_EQ(contiguous_bytes(DType::kF4E2M1, Shape({3})).status().code(),
            StatusCode::kInvalidShape);
}

TEST(Tensor, ChecksNameTheFieldTheFoundAndTheNeeded) {
  Tensor t = Tensor::zeros(DType::kF32, {8, 7, 14}).value();
  const Status s = expect_shape("w2_scale", t.view(), {8, 8, 14});
  EXPECT_EQ(s.code(), StatusCode::kInvalidShape);
  EXPECT_EQ(s.message(), "w2_scale: got [8, 7, 14], need [8, 8, 14]");
  EXPECT_EQ(expect_no_overlap("a", t.view(), "b", t.view()).code(), StatusCode::kAliasing);
}

TEST(Tensor, IsContiguousByStridesOrWithoutElements) {
  Tensor t = Tensor::zeros(DType::kF32, {4, 6}).value();
  TensorView view = t.view();
  EXPECT_TRUE(view.is_contiguous());
  view.strides = {8, 1};
  EXPECT_FALSE(view.is_contiguous());
  view.strides = {0, 0};
  EXPECT_FALSE(view.is_contiguous());
  view.shape = Shape({0, 6});
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_TRUE(expect_contiguous("x", view).ok());
}

TEST(Tensor, DTypeNamesRoundTrip) {
  for (int i = 0; i < 22; ++i) {
    const auto d = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(dtype_name(d)), d);
  }
  EXPECT_FALSE(dtype_from_name("f32").has_value());
}

// What a cast makes of an engine's own number.
TEST(Tensor, DTypesOutsideTheEnumerationAreRefused) {
  for (const int i : {24, 36, 99, 255}) {
    const auto d = static_cast<DType>(i);
    EXPECT_EQ(dtype_name(d), "unknown");
    EXPECT_EQ(dtype_bits(d), 0);
    EXPECT_EQ(contiguous_bytes(d, {2}).status().code(), StatusCode::kInvalidDType);
    EXPECT_EQ(Tensor::zeros(d, {2}).status().message(),
              "dtype: got " + std::to_string(i) + ", need one of DType");
  }
}

TEST(Arena, MeasuresAndCarvesAlike) {
  Arena measure = Arena::measure();
  measure.take<float>(3);
  measure.take<double>(9);
  EXPECT_EQ(measure.used(), 64 + 128);
  std::vector<std::byte> memory(192);
  Arena arena(memory);
  EXPECT_NE(arena.take<float>(3), nullptr);
  EXPECT_NE(arena.take<double>(9), nullptr);
  EXPECT_TRUE(arena.status().ok());
  EXPECT_EQ(arena.take<char>(1), nullptr);
  EXPECT_EQ(arena.status().code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_NE(arena.status().message().find("192"), std::string::npos);
}

TEST(Arena, RefusesSizesBeyondSixtyTwoBits) {
  Arena measure = Arena::measure();
  measure.take<double>(std::int64_t{1} << 61);
  EXPECT_EQ(measure.status().code(), StatusCode::kLimitExceeded);
}

TEST(Log, ASinkThatThrowsEndsNothing) {
  int calls = 0;
  set_log_sink([&](std::string_view) {
    ++calls;
    throw std::runtime_error("disk full");
  });
  log_warning_once("one");
  log_warning_once("one");
  log_warning_once("two");
  set_log_sink({});
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace moesaic
