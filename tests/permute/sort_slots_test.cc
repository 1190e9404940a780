#include "permute/sort_slots.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "interop/cases.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::Ids;

struct Sorted {
  std::vector<std::int64_t> first;
  Ids slots;
  Status status;
};
Sorted sort(const test::RoutingCase& c) {
  Sorted r;
  r.first.assign(static_cast<std::size_t>(c.num_local) + 1, -77);
  r.slots.assign(c.ids.size(), -77);
  r.status = permute::sort_slots_by_expert(c.ids, c.map, c.num_experts, c.num_local, r.first,
                                           r.slots, c.top_k);
  return r;
}

TEST(SortSlots, WorkedExample) {
  const Sorted all = sort({test::worked_ids(), {}, 2, 4, 4});
  EXPECT_EQ(all.first, (std::vector<std::int64_t>{0, 2, 3, 6, 8}));
  EXPECT_EQ(all.slots, (Ids{2, 7, 5, 0, 3, 4, 1, 6}));
  const Sorted part = sort({test::worked_ids(), test::worked_map(), 2, 4, 2});
  EXPECT_EQ(part.first, (std::vector<std::int64_t>{0, 3, 5}));
  EXPECT_EQ(part.slots, (Ids{0, 3, 4, 1, 6, 2, 5, 7}));  // remote slots last, ascending
}

TEST(SortSlots, EqualsAStableSort) {
  test::Rng rng(100);
  for (int i = 0; i < 500; ++i) {
    const test::RoutingCase c = test::random_case(rng);
    const Sorted r = sort(c);
    ASSERT_TRUE(r.status.ok()) << r.status.message();
    Ids want(c.ids.size());
    std::iota(want.begin(), want.end(), 0);
    const auto key = [&](std::int32_t s) {
      const std::int32_t e = c.local(static_cast<std::size_t>(s));
      return e < 0 ? c.num_local : e;
    };
    std::stable_sort(want.begin(), want.end(),
                     [&](std::int32_t a, std::int32_t b) { return key(a) < key(b); });
    ASSERT_EQ(r.slots, want);
    for (std::int64_t e = 0; e <= c.num_local; ++e) {
      const auto before =
          std::count_if(want.begin(), want.end(), [&](std::int32_t s) { return key(s) < e; });
      ASSERT_EQ(r.first[static_cast<std::size_t>(e)], before) << "expert " << e;
    }
  }
}

TEST(SortSlots, NothingToSort) {
  const Sorted none = sort({{}, {}, 2, 4, 4});
  EXPECT_TRUE(none.status.ok());
  EXPECT_EQ(none.first, (std::vector<std::int64_t>(5, 0)));
  const Sorted no_local = sort({{0, -1}, {-1, -1}, 2, 2, 0});  // a rank that owns nothing
  EXPECT_TRUE(no_local.status.ok());
  EXPECT_EQ(no_local.first, (std::vector<std::int64_t>{0}));
  EXPECT_EQ(no_local.slots, (Ids{0, 1}));
}

TEST(SortSlots, MisuseNamesTokenSlotAndValue) {
  expect_refusal(sort({{0, 1, 2, 4}, {}, 2, 4, 4}).status, StatusCode::kInvalidArgument,
                 {"topk_ids", "token 1, slot 1", "got expert 4", "-1 .. 3"});
  expect_refusal(sort({{0, 1, -2, 3}, {}, 2, 4, 4}).status, StatusCode::kInvalidArgument,
                 {"token 1, slot 0", "got expert -2"});
  const std::int32_t extreme = std::numeric_limits<std::int32_t>::min();
  expect_refusal(sort({{extreme}, {}, 1, 4, 4}).status, StatusCode::kInvalidArgument,
                 {"-2147483648"});
  std::vector<std::int64_t> first(5);
  Ids slots(2);
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 9}, {}, 4, 4, first, slots),
                 StatusCode::kInvalidArgument, {"flat slot 1", "9"});
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 1, 2}, {}, 4, 4, first, slots),
                 StatusCode::kInvalidShape, {"sorted_slots", "got 2", "need 3"});
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 1}, {}, 3, 3, first, slots),
                 StatusCode::kInvalidShape, {"expert_first_slot", "got 5", "need 4"});
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 1}, {}, 4, 2, first, slots),
                 StatusCode::kInvalidArgument, {"expert_map", "empty", "2 local of 4"});
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 1}, Ids{0, 1, 2}, 4, 4, first, slots),
                 StatusCode::kInvalidShape, {"expert_map", "got 3", "need 4"});
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 1}, Ids{0, 1, 2, 4}, 4, 4, first, slots),
                 StatusCode::kInvalidArgument, {"expert_map[3]", "got 4", "-1 .. 3"});
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 1}, {}, -1, 0, first, slots),
                 StatusCode::kInvalidArgument, {"num_experts", "-1"});
  expect_refusal(permute::sort_slots_by_expert(Ids{0, 1}, {}, 4, 5, first, slots),
                 StatusCode::kInvalidArgument, {"num_local_experts", "5"});
}

}  // namespace
}  // namespace moesaic
