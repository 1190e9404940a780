// Microseconds of the library's own call without rows: what a call from Python cannot be below
// (bench/python_calls.py --library empty_call_bench). The same layer: four experts of 128 x 128 in
// F32, two for each row, ids (I64) and weights from the caller.
//   empty_call_bench [CALLS]
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "moesaic/fused_moe.h"

namespace {

using namespace moesaic;

constexpr std::int64_t kExperts = 4, kTopK = 2, kHidden = 128, kInner = 128;
constexpr int kRounds = 7;

Result<FusedMoE> make_layer() {
  MOESAIC_ASSIGN_OR_RETURN(const Tensor w13,
                           Tensor::zeros(DType::kF32, {kExperts, 2 * kInner, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor w2,
                           Tensor::zeros(DType::kF32, {kExperts, kHidden, kInner}));
  MoeLayerWeights weights;
  weights.spec.hidden_size = kHidden;
  weights.spec.intermediate_size = kInner;
  weights.spec.num_experts = weights.spec.routing.num_experts = kExperts;
  weights.spec.routing.top_k = kTopK;
  weights.spec.activation_dtype = DType::kF32;
  MOESAIC_ASSIGN_OR_RETURN(weights.spec.quant, quant_scheme_from_name("f32"));
  MOESAIC_ASSIGN_OR_RETURN(weights.spec.activation, make_activation("silu"));
  StackedExpertWeights stacked;
  stacked.w13 = w13.view();
  stacked.w2 = w2.view();
  weights.experts = make_stacked_source(stacked);
  FusedMoE::Options options;
  options.include_gate = options.include_shared = false;
  return FusedMoE::create(std::move(weights), options);
}

// The thread's own time: neighbours do not lengthen it.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

Status run(int calls) {
  MOESAIC_ASSIGN_OR_RETURN(const FusedMoE layer, make_layer());
  MOESAIC_ASSIGN_OR_RETURN(const Tensor x, Tensor::zeros(DType::kF32, {0, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor ids, Tensor::zeros(DType::kI64, {0, kTopK}));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor slot_weights, Tensor::zeros(DType::kF32, {0, kTopK}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor out, Tensor::zeros(DType::kF32, {0, kHidden}));
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const double begin = thread_seconds();
    for (int i = 0; i < calls; ++i) {
      FusedMoE::Args args;
      args.hidden_states = x.view();
      args.topk_ids = ids.view();
      args.topk_weights = slot_weights.view();
      args.output = out.view();
      MOESAIC_RETURN_IF_ERROR(layer.forward(args));
    }
    best = std::min(best, (thread_seconds() - begin) / calls);
  }
  fmt::print("{:.3f} us a call\n", best * 1e6);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  const int calls = argc > 1 ? std::atoi(argv[1]) : 20000;
  if (argc > 2 || calls < 1) {
    fmt::print(stderr, "usage: empty_call_bench [CALLS]\n");
    return 2;
  }
  const Status status = run(calls);
  if (!status.ok()) fmt::print(stderr, "{}\n", status.to_string());
  return status.ok() ? 0 : 1;
}
