// Experts for an engine that routes by itself: ids and weights come from the program, not from a
// router. The same calls run them on the CPU and, where one can be used, on a GPU.
#include <moesaic/device_tensor.h>
#include <moesaic/experts.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>

namespace {

using moesaic::DeviceTensor;
using moesaic::DType;
using moesaic::Result;
using moesaic::Shape;
using moesaic::Tensor;

constexpr std::int64_t kTokens = 6, kExperts = 8, kTopK = 2, kHidden = 128, kIntermediate = 256;

// Multiples of 1/64 of `scale`, below it, which BF16 holds exactly when scale is a power of two.
Result<Tensor> random_bf16(std::mt19937& generator, const Shape& shape, float scale) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor tensor, Tensor::uninitialized(DType::kBF16, shape));
  for (std::int64_t i = 0; i < tensor.bytes() / 2; ++i) {
    const float value = scale * (static_cast<float>(generator() % 128) - 64) / 64;
    tensor.as<std::uint16_t>()[i] =
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return tensor;
}

// [M, H] F32 on the host: what the experts make of rows, ids and weights, computed on `device`.
Result<Tensor> run_on(moesaic::Device device, moesaic::ExpertSource& source, const Tensor& rows,
                      const Tensor& ids, const Tensor& weights) {
  moesaic::MoeProblem problem;
  problem.num_experts = problem.num_local_experts = kExperts;
  problem.top_k = kTopK;
  problem.hidden_size = kHidden;
  problem.intermediate_size = kIntermediate;
  problem.max_tokens = kTokens;
  problem.device = device;
  MOESAIC_ASSIGN_OR_RETURN(problem.quant, moesaic::quant_scheme_from_name("bf16"));
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::ExpertsBackend* backend, choose_experts(problem));
  MOESAIC_ASSIGN_OR_RETURN(const std::unique_ptr<moesaic::Experts> experts,
                           backend->create(problem, source));

  MOESAIC_ASSIGN_OR_RETURN(const auto x, DeviceTensor::copy_of(rows.view(), device));
  MOESAIC_ASSIGN_OR_RETURN(const auto topk_ids, DeviceTensor::copy_of(ids.view(), device));
  MOESAIC_ASSIGN_OR_RETURN(const auto topk_weights, DeviceTensor::copy_of(weights.view(), device));
  const Shape shape{kTokens, kHidden};
  MOESAIC_ASSIGN_OR_RETURN(DeviceTensor y, DeviceTensor::uninitialized(device, DType::kF32, shape));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, experts->workspace_size(kTokens));
  MOESAIC_ASSIGN_OR_RETURN(const auto workspace,
                           DeviceTensor::uninitialized(device, DType::kU8, {bytes}));
  moesaic::ExpertsArgs args;
  args.hidden_states = x.view();
  args.topk_ids = topk_ids.view();
  args.topk_weights = topk_weights.view();
  args.workspace = workspace.span();
  args.output = y.view();
  MOESAIC_RETURN_IF_ERROR(experts->run(args));  // a GPU has not done it yet ...
  MOESAIC_ASSIGN_OR_RETURN(Tensor result, Tensor::uninitialized(DType::kF32, shape));
  MOESAIC_RETURN_IF_ERROR(copy_tensor(y.view(), result.view()));  // ... but this waits for it
  std::printf("%s: %s", device.to_string().c_str(), std::string(experts->name()).c_str());
  return result;
}

moesaic::Status run() {
  std::mt19937 generator(1);
  MOESAIC_ASSIGN_OR_RETURN(Tensor w13,
                           random_bf16(generator, {kExperts, 2 * kIntermediate, kHidden}, 0.125F));
  MOESAIC_ASSIGN_OR_RETURN(Tensor w2,
                           random_bf16(generator, {kExperts, kHidden, kIntermediate}, 0.125F));
  moesaic::StackedExpertWeights stacked;
  stacked.w13 = w13.view();  // of each expert the gate rows, then the up rows
  stacked.w2 = w2.view();
  const std::unique_ptr<moesaic::ExpertSource> source = make_stacked_source(stacked);

  // The routing: token t goes to experts t and t + 3, with weights 0.75 and 0.25.
  MOESAIC_ASSIGN_OR_RETURN(Tensor rows, random_bf16(generator, {kTokens, kHidden}, 1));
  MOESAIC_ASSIGN_OR_RETURN(Tensor ids, Tensor::uninitialized(DType::kI32, {kTokens, kTopK}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor weights, Tensor::uninitialized(DType::kF32, {kTokens, kTopK}));
  for (std::int64_t i = 0; i < kTokens * kTopK; ++i) {
    ids.as<std::int32_t>()[i] = static_cast<std::int32_t>((i / kTopK + 3 * (i % kTopK)) % kExperts);
    weights.as<float>()[i] = i % kTopK == 0 ? 0.75F : 0.25F;
  }
  for (const moesaic::Device device : {moesaic::Device::cpu(), moesaic::Device::cuda(0)}) {
    if (const moesaic::Status usable = check_device(device); !usable.ok()) {
      std::printf("%s\n", usable.message().c_str());
      continue;
    }
    MOESAIC_ASSIGN_OR_RETURN(const Tensor y, run_on(device, *source, rows, ids, weights));
    double squares = 0;
    for (std::int64_t i = 0; i < kTokens * kHidden; ++i) {
      squares += static_cast<double>(y.as<float>()[i]) * static_cast<double>(y.as<float>()[i]);
    }
    std::printf(", output rms %.4f\n", std::sqrt(squares / (kTokens * kHidden)));
  }
  return {};
}

}  // namespace

int main() {
  const moesaic::Status status = run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
