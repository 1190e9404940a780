// Words and layout of a peer window.
#include "parallel/peer_control.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "support/random.h"
#include "support/refusal.h"

namespace moesaic::parallel {
namespace {

using test::expect_refusal;

TEST(PeerWord, FieldsLieWhereTheFormatSays) {
  EXPECT_EQ(pack_peer_word({0x89ABCDEFU, 0xFEDCBU, 0xA53U}), 0x89ABCDEF'FEDCB'A53U);
  EXPECT_EQ(pack_peer_word({}), 0U);
  test::Rng rng(18);
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t bits = rng.next();
    EXPECT_EQ(pack_peer_word(unpack_peer_word(bits)), bits);
  }
}

TEST(PeerWord, EpochsWrap) {
  for (const std::uint32_t base : {0U, 1U, 0x7FFFFFFFU, 0x80000000U, 0xFFFFFFFEU, 0xFFFFFFFFU}) {
    EXPECT_EQ(epoch_difference(base, base), 0);
    EXPECT_EQ(epoch_difference(base + 1, base), 1);
    EXPECT_EQ(epoch_difference(base, base + 3), -3);
    EXPECT_EQ(epoch_difference(base + 0x7FFFFFFFU, base), 0x7FFFFFFF);
  }
}

TEST(PeerWord, SignaturesUseEveryBitOfTheHash) {
  for (int bit = 0; bit < 64; ++bit) {
    EXPECT_NE(peer_signature(std::uint64_t{1} << bit), 0U) << bit;
    EXPECT_LE(peer_signature(~(std::uint64_t{1} << bit)), kPeerSignatureMask);
  }
}

TEST(PeerWord, AWaiterConcludes) {
  for (const std::uint32_t epoch : {1U, 2U, 77U, 0U, 0xFFFFFFFFU}) {
    const PeerExpected expected{epoch, epoch - 3, 0x123, 100};
    const auto judged = [&](std::uint32_t word_epoch, std::uint32_t live, std::uint32_t signature) {
      return judge_peer_word({word_epoch, live, signature}, expected);
    };
    EXPECT_EQ(judged(epoch, 0, 0x123), PeerVerdict::kReady);
    EXPECT_EQ(judged(epoch, 100, 0x123), PeerVerdict::kReady);
    EXPECT_EQ(judged(epoch, 101, 0x123), PeerVerdict::kTooManyRows);
    EXPECT_EQ(judged(epoch, 5, 0x122), PeerVerdict::kOtherCall);
    // Whatever the other fields are: they are of another call.
    EXPECT_EQ(judged(epoch - 1, 101, 0x122), PeerVerdict::kNotYet);
    EXPECT_EQ(judged(epoch - 3, 5, 0x123), PeerVerdict::kNotYet);
    EXPECT_EQ(judged(epoch - 4, 5, 0x123), PeerVerdict::kStale);
    EXPECT_EQ(judged(epoch - 0x70000000U, 5, 0x123), PeerVerdict::kStale);
    EXPECT_EQ(judged(epoch + 1, 5, 0x123), PeerVerdict::kFuture);
    EXPECT_EQ(judged(epoch + 0x70000000U, 5, 0x123), PeerVerdict::kFuture);
  }
}

// [begin, end) of everything in a window.
std::vector<std::pair<std::int64_t, std::int64_t>> pieces_of(const PeerLayout& w) {
  const PeerShape& s = w.shape;
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  const auto add = [&all](std::int64_t begin, std::int64_t bytes) {
    all.emplace_back(begin, begin + bytes);
  };
  for (int line = 0; line < kPeerOwnLines; ++line) {
    add(w.own_line(static_cast<PeerOwnLine>(line)), kPeerLine);
  }
  for (std::int64_t r = 0; r < s.ranks; ++r) {
    add(w.word(PeerKind::kMeta, r), kPeerLine);
    for (int c = 0; c < kPeerWordCopies; ++c) {
      add(w.word(PeerKind::kRows, r, c), 8);
      add(w.word(PeerKind::kAnswers, r, c), 8);
    }
    add(w.word(PeerKind::kRefuse, r), kPeerLine);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      add(w.id(r, t), s.top_k * 4);
      add(w.weight(r, t), s.top_k * 4);
      add(w.row(r, t), s.row_bytes);
      if (s.scale_bytes > 0) add(w.scale(r, t), s.scale_bytes);
      if (s.form == PeerAnswerForm::kPartial) add(w.partial(r, t), s.answer_bytes);
    }
  }
  if (s.form == PeerAnswerForm::kSlot) {
    for (std::int64_t t = 0; t < s.tokens; ++t) {
      for (std::int64_t k = 0; k < s.top_k; ++k) add(w.slot(t, k), s.answer_bytes);
    }
  }
  return all;
}

TEST(PeerLayout, NothingOverlapsAndWritersShareNoLine) {
  for (const PeerAnswerForm form : {PeerAnswerForm::kPartial, PeerAnswerForm::kSlot}) {
    for (const PeerShape& shape :
         {PeerShape{1, 1, 1, 1, 1, form}, PeerShape{3, 5, 3, 200, 90, form},
          PeerShape{8, 16, 8, 7168, 14336, form, 224}, PeerShape{64, 2, 1, 128, 129, form, 4}}) {
      const PeerLayout w = make_peer_layout(shape).value();
      auto all = pieces_of(w);
      std::sort(all.begin(), all.end());
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_LE(all[i].second, i + 1 < all.size() ? all[i + 1].first : w.bytes) << i;
      }
      EXPECT_EQ(all.front().first, 0);
      EXPECT_EQ(w.bytes % kPeerLine, 0);
      for (std::int64_t r = 0; r < shape.ranks; ++r) {
        for (const std::int64_t begin : {w.id(r, 0), w.weight(r, 0), w.row(r, 0), w.scale(r, 0)}) {
          EXPECT_EQ(begin % kPeerLine, 0);
        }
        EXPECT_EQ(w.partial(r, 0) % kPeerLine, 0);
      }
      EXPECT_EQ(w.slot(0, 0) % kPeerLine, 0);
    }
  }
}

// DeepSeek-V3 on 8 ranks: the figures by hand.
TEST(PeerLayout, SizesOfARealShape) {
  const PeerLayout w =
      make_peer_layout({8, 4096, 8, 7168, 2 * 7168, PeerAnswerForm::kPartial, 4 * 56}).value();
  EXPECT_EQ(w.row_pitch, 7168);
  EXPECT_EQ(w.scale_pitch, 256);
  EXPECT_EQ(w.own_lines, 10 * 8 * 128);
  EXPECT_EQ(w.ids, 10 * 8 * 128 + 5 * 128);
  EXPECT_EQ(w.rows - w.ids, 2 * 8 * 4096 * 8 * 4);
  EXPECT_EQ(w.scales - w.rows, std::int64_t{8} * 4096 * 7168);
  EXPECT_EQ(w.answers - w.scales, std::int64_t{8} * 4096 * 256);
  EXPECT_EQ(w.bytes - w.answers, std::int64_t{8} * 4096 * 14336);
  const PeerLayout slots =
      make_peer_layout({64, 128, 8, 7392, 14336, PeerAnswerForm::kSlot}).value();
  EXPECT_EQ(slots.bytes - slots.answers, std::int64_t{128} * 8 * 14336);
}

TEST(PeerLayout, RefusesWithNamesAndNumbers) {
  const auto refused = [](PeerShape shape) { return make_peer_layout(shape).status(); };
  using enum StatusCode;
  expect_refusal(refused({0, 1, 1, 1, 1}), kInvalidArgument, {"ranks = 0", "at least 1"});
  expect_refusal(refused({1, -3, 1, 1, 1}), kInvalidArgument, {"tokens = -3"});
  expect_refusal(refused({1, 1, 0, 1, 1}), kInvalidArgument, {"top_k = 0"});
  expect_refusal(refused({1, 1, 1, 0, 1}), kInvalidArgument, {"row_bytes = 0"});
  expect_refusal(refused({1, 1, 1, 1, 0}), kInvalidArgument, {"answer_bytes = 0"});
  expect_refusal(refused({1, 1, 1, 1, 1, PeerAnswerForm::kPartial, -4}), kInvalidArgument,
                 {"scale_bytes = -4"});
  expect_refusal(refused({1025, 1, 1, 1, 1}), kLimitExceeded, {"ranks = 1025", "1024", "mask"});
  expect_refusal(refused({1, 1 << 20, 1, 1, 1}), kLimitExceeded,
                 {"tokens = 1048576", "1048575", "20 bits"});
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  expect_refusal(refused({2, 4, kHuge, 1, 1}), kLimitExceeded, {"ids", "2^63 - 1"});
  expect_refusal(refused({2, 4, 1, kHuge, 1}), kLimitExceeded, {"rows", "2^63 - 1"});
  expect_refusal(refused({2, 4, 1, 1, kHuge}), kLimitExceeded, {"answers", "2^63 - 1"});
  expect_refusal(refused({2, 4, 1, 1, 1, PeerAnswerForm::kPartial, kHuge}), kLimitExceeded,
                 {"scales", "2^63 - 1"});
  // Rounding up to a line, and the sum of pieces of which each would fit.
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  expect_refusal(refused({1, 1, 1, kMost, 1}), kLimitExceeded, {"rows"});
  expect_refusal(refused({1, 1, 1, kHuge, kHuge}), kLimitExceeded, {"answers"});
  EXPECT_TRUE(make_peer_layout({1, 1, 1, kHuge, 1}).ok());
}

}  // namespace
}  // namespace moesaic::parallel
