// Kernels of the transport by messages: virtual ranks on one GPU, one after the other on one stream;
// the messages between them are copied on the host. Expected values are computed on the host and
// equal by bits. Skipped, visibly, without a device.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "prepare_finalize/sm90/rank_rows.h"
#include "support/cuda_device.h"
#include "support/random.h"

namespace moesaic {
namespace {

using test::DeviceBytes;

constexpr std::int32_t kRanks = 3, kExperts = 7, kTopK = 3;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// The rows of one rank, of which row t is made of numbers that no other row has.
struct OwnRows {
  OwnRows(int rank, std::int64_t count, std::int64_t hidden_bytes, std::int32_t groups)
      : tokens(count), hidden(at(count * hidden_bytes)), scale(at(groups * (count + 1))) {
    test::Rng rng(40 + static_cast<std::uint64_t>(rank));
    for (auto& b : hidden) b = static_cast<std::uint8_t>(rng.next());
    for (float& f : scale) f = static_cast<float>(rng.next() % 1000);
    for (std::int64_t i = 0; i < count * kTopK; ++i) {
      ids.push_back(static_cast<std::int32_t>(rng.next() % (kExperts + 2)) -
                    1);  // also none, beyond
      weights.push_back(static_cast<float>(rng.next() % 1000));
    }
  }
  std::int64_t tokens;
  std::vector<std::uint8_t> hidden;
  std::vector<float> scale;  // [groups][tokens + 1]
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

class RankRows {
 public:
  RankRows(std::int64_t hidden_bytes, std::int32_t groups) {
    row_.hidden_bytes = hidden_bytes;
    row_.groups = groups;
    row_.top_k = kTopK;
    const std::int64_t counts[kRanks] = {700, 0, 5};  // more than a block lists at a time; none
    for (int r = 0; r < kRanks; ++r) own_.emplace_back(r, counts[r], hidden_bytes, groups);
    for (std::int32_t e = 0; e < kExperts; ++e) owners_.push_back(e * 5 % kRanks);
  }

  const OwnRows& own(int r) const { return own_[at(r)]; }
  bool goes(int from, std::int64_t t, int to) const {
    for (std::int64_t j = 0; j < kTopK; ++j) {
      const std::int32_t id = own(from).ids[at(t * kTopK + j)];
      if (id >= 0 && id < kExperts && owners_[at(id)] == to) return true;
    }
    return false;
  }

  // The plan of rank r, compared with the host's; its lists and counts, and its places.
  void plan(int r) {
    const OwnRows& mine = own(r);
    const DeviceBytes ids(mine.ids), owner(owners_);
    DeviceBytes index(kRanks * kCapacity * 4), position(mine.tokens * kRanks * 4),
        counts(kRanks * 4), host_counts(kRanks * 4);
    cuda::SendPlanParams p;
    p.ids = ids.as<std::int32_t>();
    p.owner = owner.as<std::int32_t>();
    p.num_experts = kExperts;
    p.ranks = kRanks;
    p.top_k = kTopK;
    p.tokens = static_cast<std::int32_t>(mine.tokens);
    p.capacity = kCapacity;
    p.index = index.as<std::int32_t>();
    p.position = position.as<std::int32_t>();
    p.counts = counts.as<std::int32_t>();
    p.host_counts = host_counts.as<std::int32_t>();
    ASSERT_EQ(cuda::launch_send_plan(p, nullptr), 0);
    lists_[r].clear();
    position_[r] = position.values<std::int32_t>();
    counts_[r] = counts.values<std::int32_t>();
    EXPECT_EQ(host_counts.values<std::int32_t>(), counts_[r]);
    const auto listed = index.values<std::int32_t>();
    for (int to = 0; to < kRanks; ++to) {
      std::vector<std::int32_t> want;
      for (std::int64_t t = 0; t < mine.tokens; ++t) {
        const bool sent = goes(r, t, to);
        EXPECT_EQ(position_[r][at(t * kRanks + to)], sent ? std::ssize(want) : -1) << t;
        if (sent) want.push_back(static_cast<std::int32_t>(t));
      }
      const auto first = listed.begin() + to * kCapacity;
      lists_[r].emplace_back(first, first + counts_[r][at(to)]);
      EXPECT_EQ(lists_[r].back(), want) << "from " << r << " to " << to;
    }
    for (const DeviceBytes* d : {&index, &position, &counts}) EXPECT_TRUE(d->margin_is_intact());
  }

  // Rows of all ranks that go to rank `to`, packed there and unpacked here one rank after the other.
  void pack_and_unpack(int to) {
    std::int64_t all = 0;
    for (int r = 0; r < kRanks; ++r) all += counts_[r][at(to)];
    const std::int64_t stride = all + 3;
    DeviceBytes hidden(all * row_.hidden_bytes), scale(row_.groups * stride * 4 + 4),
        ids(all * kTopK * 4), weights(all * kTopK * 4);
    const cuda::RowArrays arrays{hidden.as<std::byte>(), scale.as<float>(), stride,
                                 ids.as<std::int32_t>(), weights.as<float>()};
    std::int64_t first = 0;
    for (int r = 0; r < kRanks; ++r) {
      const OwnRows& mine = own(r);
      const std::int64_t count = counts_[r][at(to)];
      const DeviceBytes x(mine.hidden), s(mine.scale), i(mine.ids), w(mine.weights),
          index(lists_[r][at(to)]);
      const cuda::RowArrays from{x.as<std::byte>(), s.as<float>(), mine.tokens + 1,
                                 i.as<std::int32_t>(), w.as<float>()};
      DeviceBytes message(count * row_.bytes());
      ASSERT_EQ(cuda::launch_pack_rows(row_, from, index.as<std::int32_t>(), count,
                                       message.as<std::byte>(), nullptr),
                0);
      ASSERT_EQ(
          cuda::launch_unpack_rows(row_, message.as<std::byte>(), count, arrays, first, nullptr),
          0);
      EXPECT_TRUE(message.margin_is_intact());
      first += count;
    }
    const auto got_rows = hidden.values<std::uint8_t>();
    const auto got_scale = scale.values<float>();
    const auto got_ids = ids.values<std::int32_t>();
    const auto got_weights = weights.values<float>();
    std::int64_t row = 0;
    for (int r = 0; r < kRanks; ++r) {
      const OwnRows& mine = own(r);
      for (const std::int32_t t : lists_[r][at(to)]) {
        EXPECT_EQ(std::memcmp(got_rows.data() + row * row_.hidden_bytes,
                              mine.hidden.data() + t * row_.hidden_bytes, at(row_.hidden_bytes)),
                  0);
        for (std::int64_t g = 0; g < row_.groups; ++g) {
          EXPECT_EQ(got_scale[at(g * stride + row)], mine.scale[at(g * (mine.tokens + 1) + t)]);
        }
        for (std::int64_t j = 0; j < kTopK; ++j) {
          EXPECT_EQ(got_ids[at(row * kTopK + j)], mine.ids[at(t * kTopK + j)]);
          EXPECT_EQ(got_weights[at(row * kTopK + j)], mine.weights[at(t * kTopK + j)]);
        }
        ++row;
      }
    }
    for (const DeviceBytes* d : {&hidden, &scale, &ids, &weights}) {
      EXPECT_TRUE(d->margin_is_intact());
    }
  }

  // What the ranks answer for the rows of rank r, partial sums or the rows of slots, added up there.
  void sum(int r, bool slots) {
    constexpr std::int64_t kHidden = 36;
    const OwnRows& mine = own(r);
    std::vector<float> answers;
    std::int64_t before[kRanks + 1] = {};
    for (int s = 0; s < kRanks; ++s) before[s + 1] = before[s] + counts_[r][at(s)];
    test::Rng rng(90);
    const std::int64_t rows_of_answer = slots ? kTopK : 1;
    for (std::int64_t i = 0; i < before[kRanks] * rows_of_answer * kHidden; ++i) {
      // Sums of these depend on their order.
      answers.push_back((static_cast<float>(rng.next() % 2000) - 1000.0F) *
                        (rng.next() % 2 == 0 ? 1.0F : 0x1p-22F));
    }
    const DeviceBytes there(answers), position(position_[r]), counts(counts_[r]), ids(mine.ids),
        owner(owners_);
    DeviceBytes sums(mine.tokens * kHidden * 4);
    cuda::AnswerParams p;
    p.answers = there.as<void>();
    p.position = position.as<std::int32_t>();
    p.counts = counts.as<std::int32_t>();
    p.ranks = kRanks;
    p.hidden = kHidden;
    p.tokens = mine.tokens;
    p.sum = sums.as<void>();
    p.ids = ids.as<std::int32_t>();
    p.owner = owner.as<std::int32_t>();
    p.top_k = kTopK;
    p.num_experts = kExperts;
    ASSERT_EQ(slots ? cuda::launch_sum_slots(p, nullptr) : cuda::launch_sum_answers(p, nullptr), 0);
    const auto got = sums.values<float>();
    for (std::int64_t t = 0; t < mine.tokens; ++t) {
      for (std::int64_t h = 0; h < kHidden; ++h) {
        float want = 0;
        const auto add = [&](int s, std::int64_t j) {
          const std::int32_t place = position_[r][at(t * kRanks + s)];
          const std::int64_t row = (before[s] + place) * rows_of_answer + j;
          if (place >= 0) want += answers[at(row * kHidden + h)];
        };
        if (slots) {
          for (std::int64_t j = 0; j < kTopK; ++j) {
            const std::int32_t id = mine.ids[at(t * kTopK + j)];
            if (id >= 0 && id < kExperts) add(owners_[at(id)], j);
          }
        } else {
          for (int s = 0; s < kRanks; ++s) add(s, 0);
        }
        ASSERT_EQ(got[at(t * kHidden + h)], want) << "row " << t << ", column " << h;
      }
    }
    EXPECT_TRUE(sums.margin_is_intact());
  }

 private:
  static constexpr std::int32_t kCapacity = 701;
  cuda::MessageRow row_;
  std::vector<OwnRows> own_;
  std::vector<std::int32_t> owners_;
  std::vector<std::vector<std::int32_t>> lists_[kRanks];
  std::vector<std::int32_t> position_[kRanks], counts_[kRanks];
};

TEST(CudaRankRows, KernelsHaveTheBitsOfTheHost) {
  REQUIRE_HOPPER();
  for (const std::int32_t groups : {0, 2}) {
    RankRows world(groups > 0 ? 256 : 528, groups);
    for (int r = 0; r < kRanks; ++r) world.plan(r);
    for (int r = 0; r < kRanks; ++r) world.pack_and_unpack(r);
    for (const bool slots : {false, true}) {
      for (int r = 0; r < kRanks; ++r) world.sum(r, slots);
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace moesaic
