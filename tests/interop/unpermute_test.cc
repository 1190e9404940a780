#include <cmath>
#include <cstring>

#include "interop/cases.h"
#include "moesaic/interop/permute.h"
#include "support/metrics.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::Ids;

constexpr std::int64_t kWidth = 5;

// A routing with expert rows y placed by the contiguous plan; entries of inv_perm that belong to
// other ranks, and rows that belong to nobody, are poison.
struct Placed {
  test::RoutingCase c;
  Ids inv_perm;
  Tensor y;
  std::vector<float> weights;
  Tensor out;
  Status run() {
    test::poison(out.view());
    return unpermute_and_reduce(c.routing(), y.view(), weights, inv_perm, out.view());
  }
};
// `value(slot, h)` is what the expert of a slot produced.
template <class Value>
Placed place(const test::RoutingCase& c, DType dtype, const Value& value) {
  Placed p;
  p.c = c;
  const auto slots = static_cast<std::int64_t>(c.ids.size());
  const ContiguousRows rows = contiguous_rows_bound(slots, c.num_local, 4, 128).value();
  std::vector<std::int64_t> start(static_cast<std::size_t>(c.num_local) + 1);
  Ids experts(static_cast<std::size_t>(rows.m_sum));
  p.inv_perm.assign(c.ids.size(), 0x7FFFFFFF);
  EXPECT_TRUE(plan_contiguous_permutation(c.routing(), rows, start, experts, p.inv_perm).ok());
  p.y = Tensor::zeros(DType::kF32, {rows.m_sum, kWidth}).value();
  test::poison(p.y.view());
  p.out = Tensor::zeros(dtype, {slots / c.top_k, kWidth}).value();
  for (std::size_t s = 0; s < c.ids.size(); ++s) {
    p.weights.push_back(0.25F * static_cast<float>(s % 7) - 0.5F);
    if (c.local(s) < 0) continue;
    for (std::int64_t h = 0; h < kWidth; ++h) {
      p.y.as<float>()[p.inv_perm[s] * kWidth + h] = value(s, h);
    }
  }
  return p;
}

// Small integers times quarters: every partial sum is exact, so the answer is known to the bit.
TEST(Unpermute, ExactOnRepresentableSums) {
  test::Rng rng(500);
  for (int i = 0; i < 300; ++i) {
    const test::RoutingCase c = test::random_case(rng);
    const auto value = [](std::size_t s, std::int64_t h) {
      return static_cast<float>((static_cast<std::int64_t>(s) * 5 + h) % 17 - 8);
    };
    Placed p = place(c, DType::kF32, value);
    ASSERT_TRUE(p.run().ok());
    const std::int64_t tokens = p.out.shape()[0];
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t h = 0; h < kWidth; ++h) {
        double want = 0;
        for (std::int64_t j = 0; j < c.top_k; ++j) {
          const auto s = static_cast<std::size_t>(t * c.top_k + j);
          if (c.local(s) >= 0) {
            want += static_cast<double>(p.weights[s]) * static_cast<double>(value(s, h));
          }
        }
        ASSERT_EQ(static_cast<double>(p.out.as<float>()[t * kWidth + h]), want);
      }
    }
  }
}

TEST(Unpermute, TokensWithoutLocalSlotsAreZeroRows) {
  const test::RoutingCase c{{0, 1, -1, -1, 2, 0, 1, 0}, test::worked_map(), 2, 4, 2};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Placed p = place(c, dtype, [](std::size_t, std::int64_t) { return 3.0F; });
    ASSERT_TRUE(p.run().ok());
    for (const std::int64_t t : {0, 1, 3}) {
      const std::int64_t bytes = p.out.bytes() / 4;
      for (std::int64_t b = 0; b < bytes; ++b) {
        EXPECT_EQ(p.out.as<std::uint8_t>()[t * bytes + b], 0) << "token " << t;
      }
    }
  }
}

TEST(Unpermute, RoundsOnceFromFp32InSlotOrder) {
  test::Rng rng(501);
  const test::RoutingCase c{test::worked_ids(), {}, 2, 4, 4};
  const Tensor values = test::random_normal(rng, DType::kF32, {8, kWidth});
  const auto value = [&](std::size_t s, std::int64_t h) {
    return values.as<float>()[static_cast<std::int64_t>(s) * kWidth + h];
  };
  Placed f32 = place(c, DType::kF32, value);
  ASSERT_TRUE(f32.run().ok());
  Placed bf16 = place(c, DType::kBF16, value);
  ASSERT_TRUE(bf16.run().ok());
  for (std::int64_t i = 0; i < 4 * kWidth; ++i) {
    const std::int64_t t = i / kWidth;
    const auto s = static_cast<std::size_t>(2 * t);
    float want = 0.0F;
    want += f32.weights[s] * value(s, i % kWidth);
    want += f32.weights[s + 1] * value(s + 1, i % kWidth);
    EXPECT_EQ(f32.out.as<float>()[i], want);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &want, 4);
    bits += 0x7FFFU + ((bits >> 16) & 1U);
    EXPECT_EQ(bf16.out.as<std::uint16_t>()[i], bits >> 16);
  }
}

TEST(Unpermute, NoWeightsMeansOne) {
  const test::RoutingCase c{test::worked_ids(), {}, 2, 4, 4};
  Placed p =
      place(c, DType::kF32, [](std::size_t s, std::int64_t) { return static_cast<float>(s + 1); });
  p.weights.clear();
  ASSERT_TRUE(p.run().ok());
  for (std::int64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(p.out.as<float>()[t * kWidth], static_cast<float>(4 * t + 3));
  }
}

// Both layouts bring back the same bits; partial results of the ranks add up to the whole.
TEST(Unpermute, LayoutsAgreeAndRanksAddUp) {
  test::Rng rng(502);
  const auto value = [](std::size_t s, std::int64_t h) {
    return static_cast<float>((static_cast<std::int64_t>(s) * 3 + h) % 13 - 6);
  };
  for (int i = 0; i < 100; ++i) {
    test::RoutingCase c = test::random_case(rng);
    c.map.clear();
    c.num_local = c.num_experts;
    Placed whole = place(c, DType::kF32, value);
    ASSERT_TRUE(whole.run().ok());

    const auto slots = static_cast<std::int64_t>(c.ids.size());
    std::vector<std::int64_t> first(static_cast<std::size_t>(c.num_local) + 1);
    Ids sorted(c.ids.size());
    Ids inverse(c.ids.size());
    Tensor a = Tensor::zeros(DType::kF32, {slots / c.top_k, kWidth}).value();
    Tensor y = Tensor::zeros(DType::kF32, {slots, kWidth}).value();
    ASSERT_TRUE(moe_permute(c.routing(), a.view(), first, sorted, inverse, y.view()).ok());
    for (std::size_t s = 0; s < c.ids.size(); ++s) {
      for (std::int64_t h = 0; h < kWidth; ++h) {
        y.as<float>()[inverse[s] * kWidth + h] = value(s, h);
      }
    }
    Tensor other = Tensor::zeros(DType::kF32, {slots / c.top_k, kWidth}).value();
    test::poison(other.view());
    ASSERT_TRUE(
        unpermute_and_reduce(c.routing(), y.view(), whole.weights, inverse, other.view()).ok());
    std::string why;
    ASSERT_TRUE(test::same_bits(other.view(), whole.out.view(), &why)) << why;

    std::vector<double> sum(static_cast<std::size_t>(slots / c.top_k * kWidth), 0.0);
    for (int rank = 0; rank < 2; ++rank) {
      test::RoutingCase part = c;
      part.num_local = 0;
      for (std::int64_t e = 0; e < c.num_experts; ++e) {
        part.map.push_back(e % 2 == rank ? static_cast<std::int32_t>(part.num_local++) : -1);
      }
      Placed p = place(part, DType::kF32, value);
      ASSERT_TRUE(p.run().ok());
      const std::vector<double> out = test::to_doubles(p.out.view());
      for (std::size_t n = 0; n < out.size(); ++n) sum[n] += out[n];
    }
    ASSERT_EQ(sum, test::to_doubles(whole.out.view()));
  }
}

// Rows of other tokens do not matter: permuting the tokens permutes the result, bit for bit.
TEST(Unpermute, TokenOrderDoesNotMatter) {
  test::Rng rng(503);
  const test::RoutingCase c = [&] {
    test::RoutingCase r;
    r.top_k = 3;
    r.num_experts = r.num_local = 6;
    for (int s = 0; s < 30; ++s) r.ids.push_back(static_cast<std::int32_t>(rng.integer(-1, 5)));
    return r;
  }();
  const Tensor values = test::random_normal(rng, DType::kF32, {30, kWidth});
  const auto value = [&](std::size_t s, std::int64_t h) {
    return values.as<float>()[static_cast<std::int64_t>(s) * kWidth + h];
  };
  Placed p = place(c, DType::kF32, value);
  p.weights.assign(30, 0.3F);
  ASSERT_TRUE(p.run().ok());
  const auto flip = [](std::size_t s) { return (9 - s / 3) * 3 + s % 3; };  // reverses the tokens
  test::RoutingCase reversed = c;
  for (std::size_t s = 0; s < 30; ++s) reversed.ids[s] = c.ids[flip(s)];
  Placed q = place(reversed, DType::kF32,
                   [&](std::size_t s, std::int64_t h) { return value(flip(s), h); });
  q.weights.assign(30, 0.3F);
  ASSERT_TRUE(q.run().ok());
  for (std::int64_t t = 0; t < 10; ++t) {
    EXPECT_EQ(std::memcmp(p.out.as<float>() + t * kWidth, q.out.as<float>() + (9 - t) * kWidth,
                          kWidth * sizeof(float)),
              0);
  }
}

TEST(Unpermute, Misuse) {
  const test::RoutingCase c{test::worked_ids(), {}, 2, 4, 4};
  const auto one = [](std::size_t, std::int64_t) { return 1.0F; };
  Placed p = place(c, DType::kF32, one);
  p.inv_perm[3] = 20;
  expect_refusal(p.run(), StatusCode::kInvalidArgument,
                 {"inv_perm", "token 1, slot 1", "got row 20", "0 .. 19"});
  p = place(c, DType::kF32, one);
  p.inv_perm.pop_back();
  expect_refusal(p.run(), StatusCode::kInvalidShape, {"inv_perm", "got 7", "need 8"});
  p = place(c, DType::kF32, one);
  p.weights.pop_back();
  expect_refusal(p.run(), StatusCode::kInvalidShape, {"weights", "got 7", "need 8"});
  p = place(c, DType::kI32, one);
  expect_refusal(p.run(), StatusCode::kInvalidDType, {"out", "I32"});
  p = place(c, DType::kF32, one);
  p.c.ids[0] = 7;
  expect_refusal(p.run(), StatusCode::kInvalidArgument, {"token 0, slot 0", "got expert 7"});
  p = place(c, DType::kF32, one);
  p.out = Tensor::zeros(DType::kF32, {4, kWidth + 1}).value();
  expect_refusal(p.run(), StatusCode::kInvalidShape, {"out", "[4, 6]", "[4, 5]"});
  p = place(c, DType::kF32, one);
  TensorView inside(p.y.data(), DType::kF32, {4, kWidth});
  expect_refusal(unpermute_and_reduce(c.routing(), p.y.view(), p.weights, p.inv_perm, inside),
                 StatusCode::kAliasing, {"y", "out"});
  TensorView there = p.out.view();
  there.device = Device::cuda(0);
  expect_refusal(unpermute_and_reduce(c.routing(), p.y.view(), p.weights, p.inv_perm, there),
                 StatusCode::kInvalidArgument, {"out: got memory of cuda:0"});
}

}  // namespace
}  // namespace moesaic
