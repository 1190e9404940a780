// The caller's functions in a CudaLayer's call: what each is given.
#include "core/fault.h"
#include "core/guarded.h"
#include "layer/sm90/layer_impl.h"
#include "layer/sm90/layer_ops.h"

namespace moesaic::cuda {
namespace {

template <class T>
TensorView matrix(T* data, DType dtype, std::int64_t rows, std::int64_t columns, int device) {
  return {reinterpret_cast<std::byte*>(data), dtype, {rows, columns}, Device::cuda(device)};
}
ConstTensorView bf16_rows(const void* data, std::int64_t rows, std::int64_t columns, int device) {
  return {static_cast<const std::byte*>(data), DType::kBF16, {rows, columns}, Device::cuda(device)};
}

}  // namespace

Status CudaLayer::Impl::shared_function(void* stream, const Rows& rows, float* to) const {
  if (rows.tokens == 0) return {};
  return guarded("on_device.shared_experts", [&] {
    return functions.shared_experts(Stream{stream},
                                    bf16_rows(rows.x_bf16, rows.tokens, plan.hidden_size, device),
                                    matrix(to, DType::kF32, rows.tokens, plan.hidden_size, device));
  });
}

Status CudaLayer::Impl::capture_ids(void* stream, const std::int32_t* ids, std::int64_t stride,
                                    std::int64_t tokens) const {
  if (!functions.capture || tokens == 0) return {};
  ConstTensorView view(reinterpret_cast<const std::byte*>(ids), DType::kI32,
                       {tokens, plan.routing.top_k}, Device::cuda(device));
  view.strides[0] = MOESAIC_FAULT(cuda_layer_captures_ids_of_the_joined) ? view.strides[0] : stride;
  return guarded("on_device.capture", [&] { return functions.capture(Stream{stream}, view); });
}

Status CudaLayer::Impl::transform_input(void* stream, const void* x_bf16, std::int64_t tokens,
                                        const LayerWorkspace& w) const {
  if (tokens == 0) return {};
  return guarded("on_device.routed_input", [&] {
    return functions.routed_input(Stream{stream},
                                  bf16_rows(x_bf16, tokens, plan.hidden_size, device),
                                  matrix(w.latent, DType::kBF16, tokens, plan.latent_size, device));
  });
}

Status CudaLayer::Impl::transform_output(void* stream, std::int64_t tokens,
                                         const LayerWorkspace& w) const {
  if (tokens == 0) return {};
  if (plan.output_scale != 1.0F && !MOESAIC_FAULT(cuda_layer_transforms_before_it_scales)) {
    LayerCombineParams p;
    p.routed = w.routed;
    p.scale = plan.output_scale;
    p.tokens = tokens;
    p.hidden = plan.latent_size;
    p.output = w.routed;
    MOESAIC_RETURN_IF_ERROR(check_call("scale", launch_layer_combine(p, stream)));
  }
  return guarded("on_device.routed_output", [&] {
    return functions.routed_output(
        Stream{stream}, matrix(w.routed, DType::kF32, tokens, plan.latent_size, device),
        matrix(w.routed_back, DType::kF32, tokens, plan.hidden_size, device));
  });
}

}  // namespace moesaic::cuda
