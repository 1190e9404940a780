// A build without CUDA: nothing here can be made.
#include "gpu_bench.h"

namespace moesaic::tool {
namespace {

Status refused(Device device) {
  const Status status = check_device(device);
  return status.ok() ? Status(StatusCode::kInternal, "a CPU is no GPU") : status;
}

}  // namespace

Result<std::unique_ptr<GpuStage>> make_gpu_gate(Device device, const ConstTensorView&,
                                                const ConstTensorView&, int) {
  return refused(device);
}
Result<std::unique_ptr<GpuStage>> make_gpu_router(Device device, const Router::Options&) {
  return refused(device);
}
Result<std::unique_ptr<GpuStage>> make_gpu_experts(const ExpertsBackend&, const MoeProblem& problem,
                                                   ExpertSource&, bool) {
  return refused(problem.device);
}
Result<std::unique_ptr<GpuStage>> make_gpu_layer(const FusedMoE& layer) {
  return refused(layer.device());
}
Result<Ceilings> measure_gpu_ceilings(Device device, bool) { return refused(device); }
std::string gpu_name(Device) { return ""; }

}  // namespace moesaic::tool
