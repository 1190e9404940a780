// Experts for an engine that routes by itself: ids and weights come from the program, not from a
// router. The same calls run them on the CPU and, where one can be used, on a GPU.
#include <moesaic/device_tensor.h>
#include <moesaic/experts.h>

#include <cstdint>
#include <cstdio>
#include <string>

using namespace moesaic;

// Three tokens, two of four experts each.
constexpr std::int64_t kTokens = 3, kTopK = 2, kExperts = 4, kHidden = 128, kInner = 256;
const std::int32_t kIds[kTokens][kTopK] = {{0, 3}, {1, 2}, {3, 1}};
const float kWeights[kTokens][kTopK] = {{0.75F, 0.25F}, {0.5F, 0.5F}, {0.9F, 0.1F}};

// Stands for what a program has read: BF16 numbers of 1/128 to 1/64.
Result<Tensor> make_bf16(const Shape& shape) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor t, Tensor::uninitialized(DType::kBF16, shape));
  auto* const codes = t.as<std::uint16_t>();
  for (int i = 0; i < t.bytes() / 2; ++i) codes[i] = static_cast<std::uint16_t>(0x3C00 + i % 128);
  return t;
}

// Prints the first number of what the experts make of the tokens on `device`.
Status run_on(Device device, ExpertSource& source, const Tensor& rows) {
  MoeProblem problem;
  problem.num_experts = problem.num_local_experts = kExperts;
  problem.top_k = kTopK;
  problem.hidden_size = kHidden;
  problem.intermediate_size = kInner;
  problem.max_tokens = kTokens;
  problem.device = device;
  MOESAIC_ASSIGN_OR_RETURN(problem.quant, quant_scheme_from_name("bf16"));
  MOESAIC_ASSIGN_OR_RETURN(const ExpertsBackend* backend, choose_experts(problem));
  MOESAIC_ASSIGN_OR_RETURN(const auto experts, backend->create(problem, source));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, experts->workspace_size(kTokens));

  const auto copy = [&](const void* data, DType dtype, const Shape& shape) {
    return DeviceTensor::copy_of({static_cast<const std::byte*>(data), dtype, shape}, device);
  };
  const auto room = [&](DType dtype, const Shape& shape) {
    return DeviceTensor::uninitialized(device, dtype, shape);
  };
  MOESAIC_ASSIGN_OR_RETURN(const auto x, copy(rows.data(), DType::kBF16, {kTokens, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(const auto ids, copy(kIds, DType::kI32, {kTokens, kTopK}));
  MOESAIC_ASSIGN_OR_RETURN(const auto weights, copy(kWeights, DType::kF32, {kTokens, kTopK}));
  MOESAIC_ASSIGN_OR_RETURN(auto y, room(DType::kF32, {kTokens, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(const auto workspace, room(DType::kU8, {bytes}));
  ExpertsArgs args;
  args.hidden_states = x.view();
  args.topk_ids = ids.view();
  args.topk_weights = weights.view();
  args.workspace = workspace.span();
  args.output = y.view();
  MOESAIC_RETURN_IF_ERROR(experts->run(args));  // a GPU has not done it yet ...
  MOESAIC_ASSIGN_OR_RETURN(Tensor result, Tensor::zeros(DType::kF32, {kTokens, kHidden}));
  MOESAIC_RETURN_IF_ERROR(copy_tensor(y.view(), result.view()));  // ... but this waits for it
  std::printf("%s: %s, %f\n", device.to_string().c_str(), std::string(backend->name).c_str(),
              static_cast<double>(*result.as<float>()));
  return {};
}

Status run() {
  MOESAIC_ASSIGN_OR_RETURN(const Tensor rows, make_bf16({kTokens, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor w13, make_bf16({kExperts, 2 * kInner, kHidden}));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor w2, make_bf16({kExperts, kHidden, kInner}));
  StackedExpertWeights stacked;
  stacked.w13 = w13.view();  // of each expert the gate rows, then the up rows
  stacked.w2 = w2.view();
  const auto source = make_stacked_source(stacked);
  MOESAIC_RETURN_IF_ERROR(run_on(Device::cpu(), *source, rows));
  const Status usable = check_device(Device::cuda(0));
  return usable.ok() ? run_on(Device::cuda(0), *source, rows) : Status();
}

int main() {
  const Status status = run();
  if (!status.ok()) std::printf("%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
