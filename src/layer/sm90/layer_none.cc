// The GPU layer of a build without CUDA: never made, so never called.
#include "layer/sm90/layer.h"

namespace moesaic::cuda {

struct CudaLayer::Impl {};

CudaLayer::CudaLayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaLayer::~CudaLayer() = default;

Result<std::unique_ptr<CudaLayer>> CudaLayer::create(const MoeLayerSpec&, const FusedPlan&,
                                                     const FusedMoE::Options& options,
                                                     MoeLayerWeights&, const RankMesh*) {
  const Status status = check_device(options.device);
  return status.ok() ? Status(StatusCode::kInternal, "a CPU device for a GPU layer") : status;
}
Status CudaLayer::enqueue(Stream, const ConstTensorView&, const TensorView&,
                          const FusedMoE::Trace&) const {
  return {StatusCode::kUnsupported, "this build has no CUDA backend"};
}
Status CudaLayer::forward_chunk(const ConstTensorView&, const TensorView&,
                                const FusedMoE::Trace&) const {
  return {StatusCode::kUnsupported, "this build has no CUDA backend"};
}
std::int64_t CudaLayer::weight_bytes() const { return 0; }
std::int64_t CudaLayer::workspace_bytes() const { return 0; }

}  // namespace moesaic::cuda
