// Which teams of threads FusedMoE::forward requests from the OpenMP runtime on a CPU: none while
// every stage has less work than cpu/team.h wants, and the same bits on either side of that.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cfenv>

#include "cpu/team.h"
#include "cpu/tiers.h"
#include "layer/layer_case.h"
#include "support/metrics.h"

namespace {

std::atomic<int> largest_team{0};

void note_team(int threads) { largest_team = std::max(largest_team.load(), threads); }

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// These replace what compilers call for a parallel region, of libgomp and of libomp.
extern "C" {
#if defined(__clang__)
void __kmpc_push_num_threads(void* location, int thread, int num_threads);
void __kmpc_push_num_threads(void* location, int thread, int num_threads) {
  note_team(num_threads);
  next<void (*)(void*, int, int)>("__kmpc_push_num_threads")(location, thread, num_threads);
}
#else
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
void GOMP_parallel(void (*body)(void*), void* data, unsigned num_threads, unsigned flags) {
  note_team(static_cast<int>(num_threads));
  next<void (*)(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel")(body, data,
                                                                              num_threads, flags);
}
#endif
}

namespace moesaic::test {
namespace {

constexpr int kThreads = 3;

MoeLayerSpec medium_spec(const char* quant) {
  MoeLayerSpec spec = with_shared(true);
  spec.hidden_size = 256;
  spec.intermediate_size = 256;
  spec.shared.intermediate_size = 256;
  spec.quant = quant_scheme_from_name(quant).value();
  return spec;
}

FusedMoE::Options threaded(int threads, std::int64_t tokens) {
  FusedMoE::Options options;
  options.num_threads = threads;
  options.max_tokens = tokens;
  return options;
}

// The first number of tokens for which some stage has a team.
std::int64_t first_with_team(const MoeLayerSpec& spec, std::int64_t limit) {
  const LayerExplanation e = explain_layer(spec, threaded(kThreads, limit)).value();
  EXPECT_EQ(e.threads.size(), 4U);  // gate, router, experts, shared experts
  std::int64_t one = limit;
  for (const StageThreads& s : e.threads) one = std::min(one, s.one_thread_tokens);
  return one + 1;
}

TEST(LayerThreads, SmallCallsStartNoTeamAndBitsAreTheSame) {
  constexpr std::int64_t kLimit = 400;
  for (const char* quant : {"bf16", "fp8-block", "f32"}) {
    const MoeLayerSpec spec = medium_spec(quant);
    const LayerTensors tensors = make_tensors(71, spec);
    const FusedMoE one = make_layer(tensors, threaded(1, kLimit));
    const FusedMoE many = make_layer(tensors, threaded(kThreads, kLimit));
    const std::int64_t first = first_with_team(spec, kLimit);
    ASSERT_GT(first, 2) << quant;
    ASSERT_LT(first, kLimit) << quant;
    for (const std::int64_t tokens : {std::int64_t{1}, first - 1, first, first + 1, kLimit}) {
      const Tensor x = random_hidden(72, tokens, spec.hidden_size);
      const LayerRun want = run_layer(one, x);
      largest_team = 0;
      const LayerRun got = run_layer(many, x);
      const int started = largest_team;
      EXPECT_GE(started, 1) << "no parallel region was seen";
      EXPECT_EQ(started, tokens < first ? 1 : kThreads) << quant << ", tokens " << tokens;
      std::string why;
      EXPECT_TRUE(same_bits(got.output.view(), want.output.view(), &why)) << tokens << why;
      EXPECT_TRUE(same_bits(got.logits.view(), want.logits.view(), &why)) << tokens << why;
    }
  }
}

// What the caller's framework has set, on its own thread: rounding upwards here.
TEST(LayerThreads, TheCallersFloatingPointModeChangesNoBit) {
  for (const char* quant : {"bf16", "fp8-block", "int8"}) {
    const LayerTensors tensors = make_tensors(73, medium_spec(quant));
    const Tensor x = random_hidden(74, 300, 256);
    for (const int threads : {1, kThreads}) {
      const LayerRun want = run_layer(make_layer(tensors, threaded(threads, 300)), x);
      const int mode = std::fegetround();
      ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
      const LayerRun got = run_layer(make_layer(tensors, threaded(threads, 300)), x);
      const int after = std::fegetround();
      std::fesetround(mode);
      EXPECT_EQ(after, FE_UPWARD);
      std::string why;
      EXPECT_TRUE(same_bits(got.logits.view(), want.logits.view(), &why)) << quant << why;
      EXPECT_TRUE(same_bits(got.topk_weights.view(), want.topk_weights.view(), &why))
          << quant << why;
      EXPECT_TRUE(same_bits(got.output.view(), want.output.view(), &why)) << quant << why;
    }
  }
}

TEST(LayerThreads, ExplainNamesTheStagesAndTheirThreads) {
  const LayerExplanation small = explain_layer(small_spec(), threaded(kThreads, 1)).value();
  ASSERT_EQ(small.threads.size(), 3U);
  EXPECT_EQ(small.threads[0].stage, "gate");
  EXPECT_EQ(small.threads[1].stage, "router");
  EXPECT_EQ(small.threads[2].stage, "experts");
  for (const StageThreads& s : small.threads) {
    EXPECT_EQ(s.threads, 1) << s.stage;
    EXPECT_EQ(s.one_thread_tokens, 1) << s.stage;
  }
  MoeLayerSpec large = small_spec();
  large.hidden_size = 4096;
  large.intermediate_size = 14336;
  const LayerExplanation wide = explain_layer(large, threaded(kThreads, 64)).value();
  EXPECT_EQ(wide.threads[1].threads, 1);  // 512 logits
  EXPECT_EQ(wide.threads[2].threads, kThreads);
  EXPECT_EQ(wide.threads[2].one_thread_tokens, 0);
}

}  // namespace
}  // namespace moesaic::test
