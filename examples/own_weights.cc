// Builds an MoE layer from tensors that the program already has, without any checkpoint: 8 experts,
// 2 per token, softmax routing that renormalises.
#include <moesaic/fused_moe.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <utility>

namespace {

using moesaic::DType;
using moesaic::Result;
using moesaic::Shape;
using moesaic::Tensor;

Result<Tensor> random_tensor(std::mt19937& generator, const Shape& shape, double deviation) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor tensor, Tensor::uninitialized(DType::kF32, shape));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, shape.num_elements());
  std::normal_distribution<double> normal(0.0, deviation);
  for (std::int64_t i = 0; i < count; ++i) {
    tensor.as<float>()[i] = static_cast<float>(normal(generator));
  }
  return tensor;
}

moesaic::Status run() {
  constexpr std::int64_t kExperts = 8, kTopK = 2, kHidden = 64, kIntermediate = 128, kTokens = 5;
  std::mt19937 generator(1);
  const double by_hidden = 1 / std::sqrt(static_cast<double>(kHidden));
  const double by_intermediate = 1 / std::sqrt(static_cast<double>(kIntermediate));
  // w13 holds the gate rows and then the up rows of every expert.
  MOESAIC_ASSIGN_OR_RETURN(
      Tensor w13, random_tensor(generator, {kExperts, 2 * kIntermediate, kHidden}, by_hidden));
  MOESAIC_ASSIGN_OR_RETURN(
      Tensor w2, random_tensor(generator, {kExperts, kHidden, kIntermediate}, by_intermediate));

  moesaic::MoeLayerWeights weights;
  weights.spec.hidden_size = kHidden;
  weights.spec.intermediate_size = kIntermediate;
  weights.spec.num_experts = kExperts;
  weights.spec.routing.num_experts = kExperts;
  weights.spec.routing.top_k = kTopK;
  weights.spec.routing.renormalize = true;
  MOESAIC_ASSIGN_OR_RETURN(weights.spec.quant, moesaic::quant_scheme_from_name("f32"));
  weights.spec.activation_dtype = DType::kF32;
  MOESAIC_ASSIGN_OR_RETURN(weights.spec.activation, moesaic::make_activation("silu"));
  MOESAIC_ASSIGN_OR_RETURN(weights.tensors.gate_weight,
                           random_tensor(generator, {kExperts, kHidden}, by_hidden));
  moesaic::StackedExpertWeights stacked;
  stacked.w13 = w13.view();
  stacked.w2 = w2.view();
  weights.experts = moesaic::make_stacked_source(stacked);

  // The layer repacks the weights into its own layout; w13 and w2 may go afterwards.
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::FusedMoE layer,
                           moesaic::FusedMoE::create(std::move(weights), {}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor input, random_tensor(generator, {kTokens, kHidden}, 1.0));
  MOESAIC_ASSIGN_OR_RETURN(Tensor output, Tensor::uninitialized(DType::kF32, {kTokens, kHidden}));
  MOESAIC_RETURN_IF_ERROR(layer.forward(input.view(), output.view()));

  double sum = 0;
  for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
    sum += static_cast<double>(output.as<float>()[i]) * static_cast<double>(output.as<float>()[i]);
  }
  // What each stage could have run on, and why not where it was refused.
  for (const moesaic::CandidateReport& row : layer.explain()) {
    std::printf("%-17s%-22s%s\n", row.stage.c_str(), row.name.c_str(),
                row.accepted ? "accepted" : row.reason.c_str());
  }
  std::printf("backend %s, output rms %.4f\n", layer.experts_backend().c_str(),
              std::sqrt(sum / static_cast<double>(kTokens * kHidden)));
  return {};
}

}  // namespace

int main() {
  const moesaic::Status status = run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
