#include <algorithm>
#include <map>

#include "interop/cases.h"
#include "moesaic/interop/permute.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::Ids;

struct Aligned {
  Ids sorted, experts;
  std::int32_t post_pad = -77;
  Status status;
};
Aligned align(const Ids& ids, std::int64_t block, std::int64_t num_experts, const Ids& map = {},
              ExpertMapMode mode = ExpertMapMode::kPostMap, bool round_up_length = false) {
  Aligned r;
  const AlignSizes sizes =
      moe_align_sizes(static_cast<std::int64_t>(ids.size()), block, num_experts, round_up_length)
          .value();
  r.sorted.assign(static_cast<std::size_t>(sizes.sorted_ids), -77);
  r.experts.assign(static_cast<std::size_t>(sizes.expert_ids), -77);
  std::vector<std::int64_t> scratch(static_cast<std::size_t>(num_experts), -77);
  r.status = moe_align_block_size(ids, block, num_experts, map, mode, scratch, r.sorted, r.experts,
                                  &r.post_pad);
  return r;
}

TEST(AlignBlockSize, WorkedExample) {
  const Aligned r = align(test::worked_ids(), 4, 4);
  EXPECT_EQ(r.sorted, (Ids{2, 7, 8, 8, 5, 8, 8, 8, 0, 3, 4, 8, 1, 6, 8, 8, 8, 8, 8, 8}));
  EXPECT_EQ(r.experts, (Ids{0, 1, 2, 3, -1}));
  EXPECT_EQ(r.post_pad, 16);
}

TEST(AlignBlockSize, WorkedExamplePostMap) {
  const Aligned plain = align(test::worked_ids(), 4, 4);
  const Aligned r = align(test::worked_ids(), 4, 4, test::worked_map());
  EXPECT_EQ(r.sorted, plain.sorted);
  EXPECT_EQ(r.experts, (Ids{-1, -1, 0, 1, -1}));
  EXPECT_EQ(r.post_pad, 16);
}

TEST(AlignBlockSize, WorkedExampleIgnoreInvalid) {
  const Aligned r =
      align(test::worked_ids(), 4, 4, test::worked_map(), ExpertMapMode::kIgnoreInvalid);
  Ids want = {0, 3, 4, 8, 1, 6};
  want.resize(20, 8);
  EXPECT_EQ(r.sorted, want);
  EXPECT_EQ(r.experts, (Ids{0, 1, -1, -1, -1}));
  EXPECT_EQ(r.post_pad, 8);
}

TEST(AlignBlockSize, WorkedExampleBatched) {
  Ids sorted(24, -77);
  Ids blocks(6, -77);
  std::int32_t post_pad = -77;
  ASSERT_TRUE(moe_align_block_size_batched(Ids{3, 0, 5}, 8, 4, sorted, blocks, &post_pad).ok());
  Ids want = {0, 1, 2, 24, 16, 17, 18, 19, 20};
  want.resize(24, 24);
  EXPECT_EQ(sorted, want);
  EXPECT_EQ(blocks, (Ids{0, 2, 2, -1, -1, -1}));
  EXPECT_EQ(post_pad, 12);
}

TEST(AlignBlockSize, Lengths) {
  EXPECT_EQ(moe_align_sizes(8, 4, 4).value().sorted_ids, 20);
  EXPECT_EQ(moe_align_sizes(8, 4, 4).value().expert_ids, 5);
  EXPECT_EQ(moe_align_sizes(9, 4, 4).value().sorted_ids, 21);
  EXPECT_EQ(moe_align_sizes(9, 4, 4).value().expert_ids, 6);
  EXPECT_EQ(moe_align_sizes(9, 4, 4, true).value().sorted_ids, 24);
  EXPECT_EQ(moe_align_sizes(2, 16, 64).value().sorted_ids, 32);  // n < E: n B is less
  EXPECT_EQ(moe_align_sizes(0, 16, 64).value().sorted_ids, 0);
}

TEST(AlignBlockSize, IgnoredIdsAreInNoBlock) {
  const Aligned r = align({-1, 4, 1, 1000000, -5, 1}, 2, 4);
  ASSERT_TRUE(r.status.ok());
  EXPECT_EQ(r.post_pad, 2);
  EXPECT_EQ((Ids{r.sorted[0], r.sorted[1], r.sorted[2]}), (Ids{2, 5, 6}));
  EXPECT_EQ(r.experts[0], 1);
  EXPECT_EQ(r.experts[1], -1);
}

// Each valid slot once; the block's expert owns its slots; whole blocks; ascending inside an
// expert.
TEST(AlignBlockSize, PropertiesOnRandomRoutings) {
  test::Rng rng(200);
  for (int i = 0; i < 500; ++i) {
    const test::RoutingCase c = test::random_case(rng);
    const std::int64_t block = rng.integer(1, 20);
    const auto n = static_cast<std::int32_t>(c.ids.size());
    for (const auto mode : {ExpertMapMode::kPostMap, ExpertMapMode::kIgnoreInvalid}) {
      const Aligned r = align(c.ids, block, c.num_experts, c.map, mode, rng.integer(0, 1) == 1);
      ASSERT_TRUE(r.status.ok()) << r.status.message();
      ASSERT_EQ(r.post_pad % block, 0);
      std::vector<int> seen(c.ids.size(), 0);
      std::map<std::int32_t, std::int32_t> last;  // by list of slots, kept by their global id
      for (std::size_t at = 0; at < r.sorted.size(); ++at) {
        const std::int32_t s = r.sorted[at];
        if (static_cast<std::int32_t>(at) >= r.post_pad) {
          ASSERT_EQ(s, n);
        }
        if (s == n) continue;
        ++seen[static_cast<std::size_t>(s)];
        ASSERT_EQ(r.experts[at / static_cast<std::size_t>(block)],
                  c.local(static_cast<std::size_t>(s)));
        const std::int32_t id = c.ids[static_cast<std::size_t>(s)];
        if (last.count(id) != 0) {
          ASSERT_LT(last[id], s) << "stable";
        }
        last[id] = s;
      }
      for (std::size_t s = 0; s < seen.size(); ++s) {
        const bool covered = mode == ExpertMapMode::kPostMap ? c.ids[s] >= 0 : c.local(s) >= 0;
        ASSERT_EQ(seen[s], covered ? 1 : 0);
      }
      for (std::size_t b = static_cast<std::size_t>(r.post_pad / block); b < r.experts.size();
           ++b) {
        ASSERT_EQ(r.experts[b], -1);
      }
    }
  }
}

TEST(AlignBlockSize, Misuse) {
  Ids sorted(20), experts(5);
  std::vector<std::int64_t> scratch(4);
  std::int32_t post_pad = 0;
  const auto run = [&](std::int64_t block, const Ids& map) {
    return moe_align_block_size(test::worked_ids(), block, 4, map, ExpertMapMode::kPostMap, scratch,
                                sorted, experts, &post_pad);
  };
  ASSERT_TRUE(run(4, {}).ok());
  expect_refusal(moe_align_block_size(test::worked_ids(), 4, 4, {}, ExpertMapMode::kPostMap,
                                      scratch, sorted, experts, nullptr),
                 StatusCode::kInvalidArgument, {"num_tokens_post_pad", "null"});
  Ids slots(8), slot_blocks(2);
  expect_refusal(moe_align_block_size_batched(Ids{3}, 8, 4, slots, slot_blocks, nullptr),
                 StatusCode::kInvalidArgument, {"num_tokens_post_pad", "null"});
  expect_refusal(run(0, {}), StatusCode::kInvalidArgument, {"block_size", "got 0"});
  expect_refusal(run(4, {0, 1}), StatusCode::kInvalidShape, {"expert_map", "got 2", "need 4"});
  expect_refusal(run(4, {0, 1, 2, 9}), StatusCode::kInvalidArgument, {"expert_map[3]", "got 9"});
  expect_refusal(moe_align_block_size(Ids{0, 1}, 4, 4, {}, static_cast<ExpertMapMode>(2), scratch,
                                      sorted, experts, &post_pad),
                 StatusCode::kInvalidArgument, {"mode: got 2", "ExpertMapMode"});
  sorted.resize(19);
  expect_refusal(run(4, {}), StatusCode::kInvalidShape, {"sorted_ids", "got 19", "need >= 20"});
  sorted.resize(20);
  experts.resize(4);
  expect_refusal(run(4, {}), StatusCode::kInvalidShape, {"expert_ids", "got 4", "need 5"});
  experts.resize(5);
  scratch.resize(3);
  expect_refusal(run(4, {}), StatusCode::kInvalidShape, {"scratch", "got 3", "need 4"});
  const std::int64_t big = (std::int64_t{1} << 31) - 1;
  expect_refusal(moe_align_sizes(big, big, big).status(), StatusCode::kLimitExceeded,
                 {"sorted_ids"});
  expect_refusal(moe_align_sizes(big + 1, 4, 4).status(), StatusCode::kLimitExceeded,
                 {"num_slots"});
  expect_refusal(moe_align_sizes(-1, 4, 4).status(), StatusCode::kInvalidArgument, {"num_slots"});
  for (const std::int32_t count : {-1, 9}) {
    expect_refusal(moe_align_block_size_batched(Ids{3, count, 5}, 8, 4, sorted, experts, &post_pad),
                   StatusCode::kInvalidShape, {"sorted_ids", "need 24"});
    Ids right(24), blocks(6);
    expect_refusal(moe_align_block_size_batched(Ids{3, count, 5}, 8, 4, right, blocks, &post_pad),
                   StatusCode::kInvalidArgument, {"expert_num_tokens[1]", "0 .. 8"});
  }
}

}  // namespace
}  // namespace moesaic
