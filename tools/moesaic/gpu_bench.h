// The stages of a layer on a GPU, as the bench verb needs them: one call on host tensors for the
// check, and device time of many calls. In a build without CUDA making one is refused.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ceilings.h"
#include "moesaic/checkpoint.h"
#include "moesaic/device.h"
#include "moesaic/experts.h"
#include "moesaic/fused_moe.h"
#include "moesaic/router.h"

namespace moesaic::tool {

// Microseconds per pass over all rotations, at least five samples and for at least `seconds`.
using TimeFn = std::function<Result<std::vector<double>>(double seconds)>;

// A stage takes tensors and fills tensors, in an order that the factories below state.
class GpuStage {
 public:
  virtual ~GpuStage() = default;
  // Host tensors: copied to the device, one call, copied back.
  virtual Status run(const std::vector<ConstTensorView>& in,
                     const std::vector<TensorView>& out) = 0;
  // Puts every rotation's tensors on the device and captures one pass over all of them into a
  // graph. out: shapes and dtypes of the outputs of each rotation.
  virtual Result<TimeFn> timer(const std::vector<std::vector<ConstTensorView>>& in,
                               const std::vector<std::vector<TensorView>>& out) = 0;
  // The same for a stage that waits on the host and cannot be captured: run(i) works on rotation
  // i's tensors on the device and returns when it is done.
  using RunFn = std::function<Status(int rotation)>;
  virtual Result<RunFn> resident(const std::vector<std::vector<ConstTensorView>>& in,
                                 const std::vector<std::vector<TensorView>>& out) = 0;
  // The same for ranks that wait for each other on their devices: microseconds of a pass over all
  // rotations, captured into a graph. All ranks call it together. `all_ready`: a barrier, met when
  // memory is there and nothing waits yet.
  using PassFn = std::function<Result<double>()>;
  virtual Result<PassFn> captured(const std::vector<std::vector<ConstTensorView>>& in,
                                  const std::vector<std::vector<TensorView>>& out,
                                  const std::function<Status()>& all_ready) = 0;
};

// x [M, H] BF16 -> logits [M, E] F32. `copies` of the weight are rotated, so that it comes from
// memory and not from a cache.
Result<std::unique_ptr<GpuStage>> make_gpu_gate(Device device, const ConstTensorView& weight,
                                                const ConstTensorView& bias, int copies);
// logits [M, E] F32 -> ids [M, slots] I32, weights [M, slots] F32.
Result<std::unique_ptr<GpuStage>> make_gpu_router(Device device, const Router::Options& options);
// x [M, H] BF16, ids [M, k] I32, weights [M, k] F32 -> y [M, H] BF16. Layers that fit the cache are
// held several times and rotated; problem.max_tokens bounds M, and its device is the GPU. in_kernel:
// each in a ModularKernel of its own.
Result<std::unique_ptr<GpuStage>> make_gpu_experts(const ExpertsBackend& backend,
                                                   const MoeProblem& problem, ExpertSource& source,
                                                   bool in_kernel);
// x [M, H] BF16, alone or with logits [M, E] F32, or with ids [M, k] I32 and weights [M, k] F32 -> y
// [M, H] BF16 or F32 [, ids [M, k] I32, weights [M, k] F32]. The layer outlives the stage.
Result<std::unique_ptr<GpuStage>> make_gpu_layer(const FusedMoE& layer);

// Read bandwidth and peak of the device, once per process.
Result<Ceilings> measure_gpu_ceilings(Device device, bool fp8);
// "NVIDIA H100 80GB HBM3", or "" when there is none.
std::string gpu_name(Device device);

}  // namespace moesaic::tool
