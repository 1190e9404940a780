// MXFP4 experts whose groups of 32 do not divide among the ranks: gpt-oss' width of 2880 has 90.
// Source: docs/spec/checkpoints.md sections 3.4 and 9 (11).
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/container_support.h"
#include "checkpoint/pushing.h"
#include "layer/gpt_oss_file.h"
#include "layer/layer_case.h"
#include "moesaic/communicator.h"
#include "moesaic/fused_moe.h"
#include "support/hang_guard.h"
#include "support/metrics.h"

namespace moesaic::test {
namespace {

constexpr std::int64_t kExperts = kGptOssExperts, kHidden = kGptOssHidden;

ParallelConfig slice(int size, int rank) {
  ParallelConfig parallel;
  parallel.tp_size = size;
  parallel.tp_rank = rank;
  return parallel;
}

std::string row_of(const ConstTensorView& matrix, std::int64_t row, std::int64_t row_bytes) {
  return {reinterpret_cast<const char*>(matrix.data) + row * row_bytes,
          static_cast<std::size_t>(row_bytes)};
}

// The rank's expert against the whole one: rows of gate and up, columns of down, and zeros.
void expect_slice(const ExpertWeightsView& part, const ExpertWeightsView& all, std::int64_t first,
                  std::int64_t count, std::int64_t padded, bool with_down_bias) {
  const std::int64_t width = all.w2.dim(1);
  ASSERT_EQ(part.w13.shape.to_string(), Shape({2 * padded, kHidden}).to_string());
  ASSERT_EQ(part.w2.shape.to_string(), Shape({kHidden, padded}).to_string());
  ASSERT_EQ(part.w13_scale.shape.to_string(), Shape({2 * padded, kHidden / 32}).to_string());
  ASSERT_EQ(part.w2_scale.shape.to_string(), Shape({kHidden, padded / 32}).to_string());
  for (std::int64_t r = 0; r < 2 * padded; ++r) {
    const std::int64_t at = r % padded, from = r / padded * width + first + at;
    const bool real = at < count;
    const std::string codes = real ? row_of(all.w13, from, kHidden / 2) : std::string(32, '\0');
    ASSERT_EQ(row_of(part.w13, r, kHidden / 2), codes) << "row " << r;
    const std::string scales = real ? row_of(all.w13_scale, from, 2) : std::string(2, '\x7F');
    ASSERT_EQ(row_of(part.w13_scale, r, 2), scales) << "row " << r;
    const float bias = real ? all.w13_bias.as<float>()[from] : 0.0F;
    ASSERT_EQ(part.w13_bias.as<float>()[r], bias) << "row " << r;
  }
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  for (std::int64_t h = 0; h < kHidden; ++h) {
    std::string codes = row_of(all.w2, h, width / 2).substr(size(first / 2), size(count / 2));
    codes.resize(size(padded / 2), '\0');
    ASSERT_EQ(row_of(part.w2, h, padded / 2), codes) << "row " << h;
    std::string scales =
        row_of(all.w2_scale, h, width / 32).substr(size(first / 32), size(count / 32));
    scales.resize(size(padded / 32), '\x7F');
    ASSERT_EQ(row_of(part.w2_scale, h, padded / 32), scales) << "row " << h;
    const float bias = with_down_bias ? all.w2_bias.as<float>()[h] : 0.0F;
    ASSERT_EQ(part.w2_bias.as<float>()[h], bias) << "row " << h;
  }
}

TEST(UnevenSlices, EveryGroupIsOnOneRankAndTheRestIsZero) {
  for (const std::int64_t width : {std::int64_t{96}, std::int64_t{2880}}) {
    const TempDir dir;
    write_gpt_oss(dir, width);
    const Checkpoint checkpoint = Checkpoint::open(dir.path()).value();
    const MoeLayerWeights whole = checkpoint.load_layer(0, {}).value();
    const std::vector<StoredTensor> stored = read_all_tensors(dir.path());
    for (const int tp : {1, 2, 4, 5, 8, 16}) {
      const std::int64_t each = (width / 32 + tp - 1) / tp * 32;
      for (int rank = 0; rank < tp; ++rank) {
        SCOPED_TRACE(testing::Message() << width << " tp " << tp << " rank " << rank);
        const Result<MoeLayerWeights> part = checkpoint.load_layer(0, slice(tp, rank));
        ASSERT_TRUE(part.ok()) << part.status().to_string();
        const std::int64_t first = std::min(each * rank, width);
        for (std::int64_t e = 0; e < kExperts; e += 2) {
          const ExpertWeightsView all = whole.experts->expert(e).value();
          const Result<ExpertWeightsView> got = part->experts->expert(e);
          ASSERT_TRUE(got.ok()) << got.status().to_string();
          expect_slice(*got, all, first, std::min(each, width - first), each, rank == 0);
        }
        WeightLoader::Options options;
        options.parallel = slice(tp, rank);
        WeightLoader loader = loader_for(dir.path(), 0, options).value();
        ASSERT_TRUE(push(loader, stored, static_cast<std::uint64_t>(rank)).ok());
        Result<MoeLayerWeights> pushed = loader.finish();
        ASSERT_TRUE(pushed.ok()) << pushed.status().to_string();
        MoeLayerWeights again = checkpoint.load_layer(0, slice(tp, rank)).value();
        EXPECT_EQ(weights_difference(*pushed, again, kExperts), "");
      }
    }
  }
}

// Layers without a communicator yield partial sums; with one, the whole.
class UnevenLayers : public testing::TestWithParam<int> {};

TEST_P(UnevenLayers, TheSumOfTheRanksIsOneRank) {
  const TempDir dir;
  write_gpt_oss(dir, 2880);
  const Checkpoint checkpoint = Checkpoint::open(dir.path()).value();
  const Tensor x = random_hidden(3, 9, kHidden);
  const auto run = [&](const FusedMoE::Options& options) {
    const Result<FusedMoE> layer = FusedMoE::from_checkpoint(checkpoint, 0, options);
    EXPECT_TRUE(layer.ok()) << layer.status().to_string();
    return layer.ok() ? to_doubles(run_layer(*layer, x).output.view()) : std::vector<double>();
  };
  FusedMoE::Options options;
  options.max_tokens = 9;
  options.num_threads = 1;
  const std::vector<StoredTensor> stored = read_all_tensors(dir.path());
  const FusedMoE one = FusedMoE::from_checkpoint(checkpoint, 0, options).value();
  const std::vector<double> want = to_doubles(run_layer(one, x).output.view());
  const double bound = 2 * one.quant().output_bound;
  ASSERT_GT(bound, 0);
  ASSERT_LT(bound, 0.02);

  const int tp = GetParam();
  std::vector<double> sum(want.size());
  for (int rank = 0; rank < tp; ++rank) {
    options.parallel = slice(tp, rank);
    const std::vector<double> part = run(options);
    ASSERT_EQ(part.size(), sum.size());
    // The same bits from tensors that were handed over.
    WeightLoader::Options mine;
    mine.parallel = options.parallel;
    WeightLoader loader = loader_for(dir.path(), 0, mine).value();
    ASSERT_TRUE(push(loader, stored, 11).ok());
    const FusedMoE pushed = FusedMoE::create(loader.finish().value(), options).value();
    EXPECT_EQ(to_doubles(run_layer(pushed, x).output.view()), part);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    // The last ranks of 16: 90 groups are 15 times 6.
    if (tp == 16 && rank == 15) {
      EXPECT_EQ(part, std::vector<double>(want.size()));
    }
  }
  const auto parts = compare(sum, want);
  EXPECT_LE(parts.rel_l2, bound) << parts.describe;

  auto communicators = make_in_process_communicators(tp, {.timeout_ms = kHangGuardMs}).value();
  std::vector<std::vector<double>> outputs(static_cast<std::size_t>(tp));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < tp; ++rank) {
    threads.emplace_back([&, rank] {
      FusedMoE::Options own = options;
      own.parallel = slice(tp, rank);
      own.ranks.communicator = std::move(communicators[static_cast<std::size_t>(rank)]);
      outputs[static_cast<std::size_t>(rank)] = run(own);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<double>& output : outputs) {
    ASSERT_EQ(output.size(), want.size());
    const auto together = compare(output, want);
    EXPECT_LE(together.rel_l2, bound) << together.describe;
  }
}

INSTANTIATE_TEST_SUITE_P(GptOss, UnevenLayers, testing::Values(1, 2, 4, 8, 16));

}  // namespace
}  // namespace moesaic::test
