// A gate and a router by themselves: two experts whose logits differ in fp32 and tie in bf16. The
// gate is made before it is known what its router reads.
#include <moesaic/gate.h>
#include <moesaic/router.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

using namespace moesaic;

constexpr std::int64_t kExperts = 2, kHidden = 2;
// BF16: one token (1, 0.0625), experts (1, 0.091796875) and (1, 0.09375).
const std::uint16_t kToken[kHidden] = {0x3F80, 0x3D80};
const std::uint16_t kGate[kExperts][kHidden] = {{0x3F80, 0x3DBC}, {0x3F80, 0x3DC0}};

// Prints the expert that the token gets when logits are of `dtype`.
Status choose(DType dtype) {
  GateLinear::Options options;
  options.logits_dtype = std::nullopt;
  MOESAIC_ASSIGN_OR_RETURN(
      GateLinear gate, GateLinear::create({reinterpret_cast<const std::byte*>(kGate), DType::kBF16,
                                           Shape{kExperts, kHidden}},
                                          {}, options));
  Router::Options router_options;
  router_options.spec.num_experts = kExperts;
  router_options.spec.top_k = 1;
  MOESAIC_ASSIGN_OR_RETURN(const Router router, Router::create(router_options));
  MOESAIC_RETURN_IF_ERROR(gate.set_logits_dtype(dtype));

  MOESAIC_ASSIGN_OR_RETURN(Tensor logits, Tensor::zeros(gate.logits_dtype(), {1, kExperts}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor weights, Tensor::zeros(DType::kF32, {1, 1}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor ids, Tensor::zeros(DType::kI32, {1, 1}));
  MOESAIC_RETURN_IF_ERROR(
      gate.forward({reinterpret_cast<const std::byte*>(kToken), DType::kBF16, Shape{1, kHidden}},
                   logits.view()));
  Router::Args args;
  args.router_logits = logits.view();
  args.topk_weights = weights.view();
  args.topk_ids = ids.view();
  MOESAIC_RETURN_IF_ERROR(router.select_experts(args));
  std::printf("%s logits: expert %d\n", std::string(dtype_name(dtype)).c_str(),
              static_cast<int>(*ids.as<std::int32_t>()));
  return {};
}

int main() {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Status status = choose(dtype);
    if (status.ok()) continue;
    std::printf("%s\n", status.to_string().c_str());
    return 1;
  }
  return 0;
}
