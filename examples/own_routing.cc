// Experts for an engine that routes by itself: ids and weights come from the program, not from a
// router. The same calls run them on the CPU and, where one can be used, on a GPU.
#include <moesaic/device_tensor.h>
#include <moesaic/experts.h>

#include <bit>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string_view>

namespace {

using moesaic::DeviceTensor, moesaic::DType, moesaic::Result, moesaic::Tensor;
constexpr std::int64_t kTokens = 6, kExperts = 8, kTopK = 2, kHidden = 128, kIntermediate = 256;

// BF16 numbers in [-1/8, 1/8): the upper halves of floats.
Result<Tensor> random_bf16(const moesaic::Shape& shape) {
  static std::mt19937 generator(1);
  MOESAIC_ASSIGN_OR_RETURN(Tensor tensor, Tensor::uninitialized(DType::kBF16, shape));
  for (std::int64_t i = 0; i < tensor.bytes() / 2; ++i) {
    const float value = (static_cast<float>(generator() % 128) - 64) / 512;
    tensor.as<std::uint16_t>()[i] =
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
  return tensor;
}

// Prints the first number of what the experts make of rows, ids and weights on `device`.
moesaic::Status run_on(moesaic::Device device, moesaic::ExpertSource& source, const Tensor& rows,
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
  MOESAIC_ASSIGN_OR_RETURN(const auto experts, backend->create(problem, source));

  MOESAIC_ASSIGN_OR_RETURN(const auto x, DeviceTensor::copy_of(rows.view(), device));
  MOESAIC_ASSIGN_OR_RETURN(const auto topk_ids, DeviceTensor::copy_of(ids.view(), device));
  MOESAIC_ASSIGN_OR_RETURN(const auto topk_weights, DeviceTensor::copy_of(weights.view(), device));
  MOESAIC_ASSIGN_OR_RETURN(auto y,
                           DeviceTensor::uninitialized(device, DType::kF32, {kTokens, kHidden}));
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
  MOESAIC_ASSIGN_OR_RETURN(Tensor result, Tensor::zeros(DType::kF32, {kTokens, kHidden}));
  MOESAIC_RETURN_IF_ERROR(copy_tensor(y.view(), result.view()));  // ... but this waits for it
  const std::string_view name = experts->name();
  std::printf("%s: %.*s, first output %.6f\n", device.to_string().c_str(),
              static_cast<int>(name.size()), name.data(), static_cast<double>(*result.as<float>()));
  return {};
}

moesaic::Status run() {
  MOESAIC_ASSIGN_OR_RETURN(Tensor w13, random_bf16({kExperts, 2 * kIntermediate, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor w2, random_bf16({kExperts, kHidden, kIntermediate}));
  moesaic::StackedExpertWeights stacked;
  stacked.w13 = w13.view();  // of each expert the gate rows, then the up rows
  stacked.w2 = w2.view();
  const auto source = make_stacked_source(stacked);

  // The routing: token t goes to experts t and t + 3, with weights 0.75 and 0.25.
  MOESAIC_ASSIGN_OR_RETURN(Tensor rows, random_bf16({kTokens, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor ids, Tensor::zeros(DType::kI32, {kTokens, kTopK}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor weights, Tensor::zeros(DType::kF32, {kTokens, kTopK}));
  for (std::int64_t i = 0; i < kTokens * kTopK; ++i) {
    ids.as<std::int32_t>()[i] = static_cast<std::int32_t>((i / kTopK + 3 * (i % kTopK)) % kExperts);
    weights.as<float>()[i] = i % kTopK == 0 ? 0.75F : 0.25F;
  }
  MOESAIC_RETURN_IF_ERROR(run_on(moesaic::Device::cpu(), *source, rows, ids, weights));
  const moesaic::Device gpu = moesaic::Device::cuda(0);
  if (check_device(gpu).ok()) return run_on(gpu, *source, rows, ids, weights);
  std::printf("%s\n", check_device(gpu).message().c_str());
  return {};
}

}  // namespace

int main() {
  const moesaic::Status status = run();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
