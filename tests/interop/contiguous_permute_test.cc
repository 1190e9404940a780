#include <cstring>
#include <set>

#include "interop/cases.h"
#include "moesaic/interop/permute.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::Ids;

constexpr std::int32_t kPoison = -77;

struct Plan {
  ContiguousRows rows;
  std::vector<std::int64_t> start;
  Ids experts, inv_perm;
  Status status;
};
Plan plan(const test::RoutingCase& c, const ContiguousRows& rows) {
  Plan p;
  p.rows = rows;
  p.start.assign(static_cast<std::size_t>(c.num_local) + 1, kPoison);
  p.experts.assign(static_cast<std::size_t>(rows.m_sum), kPoison);
  p.inv_perm.assign(c.ids.size(), kPoison);
  p.status = plan_contiguous_permutation(c.routing(), rows, p.start, p.experts, p.inv_perm);
  return p;
}
ContiguousRows bound(const test::RoutingCase& c, std::int64_t alignment) {
  return contiguous_rows_bound(static_cast<std::int64_t>(c.ids.size()), c.num_local, alignment, 128)
      .value();
}
Ids counts_of(const test::RoutingCase& c) {
  Ids counts(static_cast<std::size_t>(c.num_local), 0);
  for (std::size_t s = 0; s < c.ids.size(); ++s) {
    if (c.local(s) >= 0) ++counts[static_cast<std::size_t>(c.local(s))];
  }
  return counts;
}

TEST(ContiguousRows, PublishedBounds) {
  const auto m_sum = [](std::int64_t m, std::int64_t k, std::int64_t locals) {
    return contiguous_rows_bound(m * k, locals, 128, 128).value().m_sum;
  };
  EXPECT_EQ(m_sum(1, 8, 256), 1024);
  EXPECT_EQ(m_sum(1, 8, 32), 1024);
  EXPECT_EQ(m_sum(7, 8, 32), 4224);
  EXPECT_EQ(m_sum(64, 8, 32), 4608);
  EXPECT_EQ(m_sum(4096, 8, 32), 36864);
  EXPECT_EQ(m_sum(1, 1, 8), 128);
  EXPECT_EQ(m_sum(0, 8, 32), 0);
}

TEST(ContiguousRows, TheoreticalAlignment) {
  const std::pair<int, int> want[] = {{1, 32},    {32, 32},   {33, 64},   {65, 96},
                                      {100, 128}, {192, 192}, {193, 224}, {100000, 224}};
  for (const auto& [m, alignment] : want) {
    EXPECT_EQ(theoretical_m_alignment(m, 10), alignment) << m;
    EXPECT_EQ(theoretical_m_alignment(m, 9), 128) << m;
  }
  // The smaller alignment shrinks the bound, and is part of the answer.
  const ContiguousRows small =
      contiguous_rows_bound(8, 256, 128, theoretical_m_alignment(8, 10)).value();
  EXPECT_EQ(small.alignment, 32);
  EXPECT_EQ(small.m_sum, 256);
}

TEST(ContiguousPlan, WorkedExample) {
  const test::RoutingCase c{test::worked_ids(), {}, 2, 4, 4};
  EXPECT_EQ(contiguous_rows_exact(counts_of(c), 4).value().m_sum, 16);
  const Plan p = plan(c, bound(c, 4));
  ASSERT_TRUE(p.status.ok());
  EXPECT_EQ(p.rows.m_sum, 20);
  EXPECT_EQ(p.start, (std::vector<std::int64_t>{0, 4, 8, 12, 16}));
  EXPECT_EQ(p.experts,
            (Ids{0, 0, -1, -1, 1, -1, -1, -1, 2, 2, 2, -1, 3, 3, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(p.inv_perm, (Ids{8, 12, 0, 9, 10, 4, 13, 1}));

  // Row -> token, through the copy of a matrix whose row t holds t.
  const Tensor a = [] {
    Tensor t = Tensor::zeros(DType::kF32, {4, 1}).value();
    for (int i = 0; i < 4; ++i) t.as<float>()[i] = static_cast<float>(i);
    return t;
  }();
  Tensor out = Tensor::zeros(DType::kF32, {20, 1}).value();
  for (int i = 0; i < 20; ++i) out.as<float>()[i] = -1;
  ASSERT_TRUE(
      permute_rows(c.routing(), p.inv_perm, a.view(), out.view(), PaddingRows::kUntouched).ok());
  const float want[] = {1, 3, -1, -1, 2, -1, -1, -1, 0, 1, 2, -1, 0, 3, -1, -1, -1, -1, -1, -1};
  for (int i = 0; i < 20; ++i) EXPECT_EQ(out.as<float>()[i], want[i]) << i;
}

TEST(ContiguousPlan, WorkedExampleOfOneRank) {
  const test::RoutingCase c{test::worked_ids(), test::worked_map(), 2, 4, 2};
  EXPECT_EQ(counts_of(c), (Ids{3, 2}));
  EXPECT_EQ(contiguous_rows_exact(counts_of(c), 4).value().m_sum, 8);
  const Plan p = plan(c, bound(c, 4));
  ASSERT_TRUE(p.status.ok());
  EXPECT_EQ(p.rows.m_sum, 16);
  Ids experts = {0, 0, 0, -1, 1, 1};
  experts.resize(16, -1);
  EXPECT_EQ(p.experts, experts);
  // Slots of other ranks are not written.
  EXPECT_EQ(p.inv_perm, (Ids{0, 4, kPoison, 1, 2, kPoison, 5, kPoison}));
}

TEST(ContiguousPlan, PropertiesOnRandomRoutings) {
  test::Rng rng(300);
  for (int i = 0; i < 500; ++i) {
    const test::RoutingCase c = test::random_case(rng);
    const std::int64_t alignment = rng.integer(1, 16);
    const ContiguousRows exact = contiguous_rows_exact(counts_of(c), alignment).value();
    const ContiguousRows upper = bound(c, alignment);
    ASSERT_GE(upper.m_sum, exact.m_sum);
    ASSERT_EQ(upper.m_sum % alignment, 0);
    for (const ContiguousRows& rows : {exact, upper}) {
      const Plan p = plan(c, rows);
      ASSERT_TRUE(p.status.ok()) << p.status.message();
      ASSERT_EQ(p.start.back(), exact.m_sum);
      std::int64_t valid_rows = 0;
      for (const std::int32_t e : p.experts) valid_rows += e >= 0 ? 1 : 0;
      std::set<std::int32_t> rows_used;  // inv_perm is injective on local slots
      std::int64_t local_slots = 0;
      for (std::size_t s = 0; s < c.ids.size(); ++s) {
        const std::int32_t e = c.local(s);
        if (e < 0) {
          ASSERT_EQ(p.inv_perm[s], kPoison);
          continue;
        }
        ++local_slots;
        const std::int32_t row = p.inv_perm[s];
        ASSERT_TRUE(rows_used.insert(row).second);
        ASSERT_EQ(p.experts[static_cast<std::size_t>(row)], e);
        ASSERT_GE(row, p.start[static_cast<std::size_t>(e)]);
        ASSERT_LT(row, p.start[static_cast<std::size_t>(e) + 1]);
      }
      ASSERT_EQ(valid_rows, local_slots);
      // A tile has one expert: the first row of a tile speaks for all its valid rows.
      for (std::size_t row = 0; row < p.experts.size(); ++row) {
        if (p.experts[row] < 0) continue;
        const auto tile =
            row / static_cast<std::size_t>(alignment) * static_cast<std::size_t>(alignment);
        ASSERT_EQ(p.experts[tile], p.experts[row]);
      }
      for (const std::int64_t start : p.start) ASSERT_EQ(start % alignment, 0);
    }
  }
}

TEST(PermuteRows, CopiesBytesOfAnyDTypeAndZeroesPaddingOnRequest) {
  test::Rng rng(301);
  for (const DType dtype : {DType::kF8E4M3, DType::kBF16, DType::kF32, DType::kF4E2M1}) {
    for (int i = 0; i < 50; ++i) {
      const test::RoutingCase c = test::random_case(rng);
      const std::int64_t tokens = static_cast<std::int64_t>(c.ids.size()) / c.top_k;
      Tensor a = Tensor::zeros(dtype, {tokens, 6}).value();
      for (std::int64_t b = 0; b < a.bytes(); ++b) {
        a.as<std::uint8_t>()[b] = static_cast<std::uint8_t>(rng.next());
      }
      const Plan p = plan(c, bound(c, 4));
      Tensor out = Tensor::zeros(dtype, {p.rows.m_sum, 6}).value();
      test::poison(out.view());
      ASSERT_TRUE(
          permute_rows(c.routing(), p.inv_perm, a.view(), out.view(), PaddingRows::kZero).ok());
      const std::int64_t row_bytes = tokens > 0 ? a.bytes() / tokens : 0;
      for (std::size_t s = 0; s < c.ids.size(); ++s) {
        if (c.local(s) < 0) continue;
        ASSERT_EQ(std::memcmp(out.data() + p.inv_perm[s] * row_bytes,
                              a.data() + static_cast<std::int64_t>(s) / c.top_k * row_bytes,
                              static_cast<std::size_t>(row_bytes)),
                  0);
      }
      for (std::size_t row = 0; row < p.experts.size(); ++row) {
        if (p.experts[row] >= 0) continue;
        for (std::int64_t b = 0; b < row_bytes; ++b) {
          ASSERT_EQ(out.as<std::uint8_t>()[static_cast<std::int64_t>(row) * row_bytes + b], 0);
        }
      }
    }
  }
}

TEST(ContiguousPlan, Misuse) {
  const test::RoutingCase c{test::worked_ids(), {}, 2, 4, 4};
  expect_refusal(plan(c, {12, 4}).status, StatusCode::kInvalidArgument,
                 {"m_sum", "got 12", "need 16", "alignment 4"});
  expect_refusal(plan(c, {16, 0}).status, StatusCode::kInvalidArgument, {"alignment", "got 0"});
  test::RoutingCase bad = c;
  bad.ids[5] = 4;
  expect_refusal(plan(bad, {20, 4}).status, StatusCode::kInvalidArgument,
                 {"topk_ids", "token 2, slot 1", "got expert 4"});
  bad = c;
  bad.top_k = 3;
  expect_refusal(plan(bad, {20, 4}).status, StatusCode::kInvalidArgument, {"top_k", "got 3", "8"});
  bad.top_k = 0;
  expect_refusal(plan(bad, {20, 4}).status, StatusCode::kInvalidArgument, {"top_k", "got 0"});
  Plan p = plan(c, {16, 4});
  Ids short_ids(15);
  expect_refusal(plan_contiguous_permutation(c.routing(), {16, 4}, p.start, short_ids, p.inv_perm),
                 StatusCode::kInvalidShape, {"expert_ids", "got 15", "need 16"});
  p.start.pop_back();
  expect_refusal(plan_contiguous_permutation(c.routing(), {16, 4}, p.start, p.experts, p.inv_perm),
                 StatusCode::kInvalidShape, {"expert_start", "got 4", "need 5"});
  expect_refusal(contiguous_rows_exact(Ids{1, -1}, 128).status(), StatusCode::kInvalidArgument,
                 {"expert_num_tokens[1]", "-1"});
  expect_refusal(contiguous_rows_exact(Ids{2147483647}, 128).status(), StatusCode::kLimitExceeded,
                 {"m_sum"});
  expect_refusal(contiguous_rows_bound(-1, 4, 128, 128).status(), StatusCode::kInvalidArgument,
                 {"num_slots"});
  expect_refusal(contiguous_rows_bound(8, 4, 0, 128).status(), StatusCode::kInvalidArgument,
                 {"alignment"});
}

TEST(PermuteRows, Misuse) {
  const test::RoutingCase c{test::worked_ids(), {}, 2, 4, 4};
  const Plan p = plan(c, {16, 4});
  Tensor a = Tensor::zeros(DType::kF32, {4, 2}).value();
  Tensor out = Tensor::zeros(DType::kF32, {16, 2}).value();
  const auto run = [&](const Ids& inv_perm, ConstTensorView in, TensorView to) {
    return permute_rows(c.routing(), inv_perm, in, to, PaddingRows::kUntouched);
  };
  ASSERT_TRUE(run(p.inv_perm, a.view(), out.view()).ok());
  Ids bad = p.inv_perm;
  for (const std::int32_t row : {-1, 16}) {
    bad[3] = row;
    expect_refusal(run(bad, a.view(), out.view()), StatusCode::kInvalidArgument,
                   {"inv_perm", "token 1, slot 1", "0 .. 15"});
  }
  Tensor half = Tensor::zeros(DType::kBF16, {16, 2}).value();
  expect_refusal(run(p.inv_perm, a.view(), half.view()), StatusCode::kInvalidDType,
                 {"out", "BF16"});
  Tensor wide = Tensor::zeros(DType::kF32, {16, 3}).value();
  expect_refusal(run(p.inv_perm, a.view(), wide.view()), StatusCode::kInvalidShape,
                 {"out", "[16, 3]", "2"});
  Tensor tall = Tensor::zeros(DType::kF32, {5, 2}).value();
  expect_refusal(run(p.inv_perm, tall.view(), out.view()), StatusCode::kInvalidShape,
                 {"a", "[5, 2]", "[4, C]"});
  TensorView inside(out.data(), DType::kF32, {4, 2});
  expect_refusal(run(p.inv_perm, inside, out.view()), StatusCode::kAliasing, {"a", "out"});
  const Device gpu = Device::cuda(0);
  expect_refusal(run(p.inv_perm, {a.data(), DType::kF32, {4, 2}, gpu}, out.view()),
                 StatusCode::kInvalidArgument, {"a: got memory of cuda:0"});
  expect_refusal(run(p.inv_perm, a.view(), {out.data(), DType::kF32, {16, 2}, gpu}),
                 StatusCode::kInvalidArgument, {"out: got memory of cuda:0"});
  bad.pop_back();
  expect_refusal(run(bad, a.view(), out.view()), StatusCode::kInvalidShape, {"inv_perm"});
}

}  // namespace
}  // namespace moesaic
