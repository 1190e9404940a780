#include "bench_stages.h"

#include <fmt/format.h>

#include "bench_parts.h"
#include "layer_origin.h"

namespace moesaic::tool {

Origin BenchSettings::origin_of(const Status& status) const {
  return checkpoint == nullptr ? Origin::kOption : layer_origin(status, *checkpoint, spec.layer);
}

Arithmetic stage_arithmetic(const std::string& stage, const BenchSettings& settings) {
  if (stage == "gate" || stage == "route") return Arithmetic::kF32;
  Scheme scheme = settings.spec.quant;
  if (settings.options.quant != "as-is") {
    const Result<Scheme> named = quant_scheme_from_name(settings.options.quant);
    if (named.ok()) scheme = *named;
  }
  const DType dtype = scheme.activation.dtype;
  if (dtype == DType::kI8) return Arithmetic::kInt8;
  // Every code of 8 bits or less is exact as a bf16 operand.
  return dtype == DType::kF32 || dtype == DType::kF16 ? Arithmetic::kF32 : Arithmetic::kNarrow;
}

Result<Ceilings> stage_ceilings(const std::string& stage, const BenchSettings& settings,
                                int threads) {
  const Device device = settings.options.device;
  const Arithmetic arithmetic = stage_arithmetic(stage, settings);
  if (!device.is_cuda()) return measure_ceilings(threads, arithmetic);
  const bool fp8 =
      arithmetic != Arithmetic::kF32 && settings.spec.quant.activation.dtype == DType::kF8E4M3;
  return measure_gpu_ceilings(device, fp8);
}

Result<std::unique_ptr<BenchStage>> make_bench_stage(const std::string& stage,
                                                     const BenchSettings& settings) {
  if (stage == "gate") return make_gate_stage(settings);
  if (stage == "route") return make_route_stage(settings);
  if (stage == "experts") return make_experts_stage(settings);
  if (stage == "kernel") return make_kernel_stage(settings);
  if (stage == "layer") return make_layer_stage(settings);
  return Status(
      StatusCode::kInvalidArgument,
      fmt::format("--stage: got '{}', need gate, route, experts, kernel or layer", stage));
}

}  // namespace moesaic::tool
