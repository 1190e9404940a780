// A case of tests on the device: its tensors, the GPU experts stage that is bound to its weights, and
// a run.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "experts/sm90/experts.h"
#include "support/cuda_device.h"
#include "support/experts_run.h"

namespace moesaic::test {

// A case on the device.
struct OnDevice {
  const StandardCase& c;
  std::int64_t tokens;
  std::unique_ptr<cuda::CudaExperts> experts;
  DeviceBytes x, ids, weights, map, workspace;
  std::int64_t workspace_bytes;

  OnDevice(const StandardCase& host, std::unique_ptr<cuda::CudaExperts> made)
      : c(host),
        tokens(host.hidden_states.shape()[0]),
        experts(std::move(made)),
        x(host.hidden_states.data(), host.hidden_states.bytes()),
        ids(host.routing.ids.data(), host.routing.ids.bytes()),
        weights(host.routing.weights.data(), host.routing.weights.bytes()),
        map(host.expert_map.data(), static_cast<std::int64_t>(host.expert_map.size() * 4)),
        workspace(cuda::CudaExperts::workspace_size(host.problem, tokens).value()),
        workspace_bytes(cuda::CudaExperts::workspace_size(host.problem, tokens).value()) {}

  cuda::CudaExpertsArgs args(void* output, DType dtype) const {
    cuda::CudaExpertsArgs a;
    a.tokens = tokens;
    a.rows = cuda::CudaRows::values(x.as(), c.hidden_states.dtype());
    a.topk_ids = ids.as<std::int32_t>();
    a.topk_weights = weights.as<float>();
    a.expert_map = c.expert_map.empty() ? nullptr : map.as<std::int32_t>();
    a.result = cuda::CudaResult::sum(output, dtype);
    a.workspace = workspace.as();
    a.workspace_bytes = workspace_bytes;
    return a;
  }
  Tensor run(DType dtype = DType::kF32) const {
    Tensor host = Tensor::uninitialized(dtype, c.hidden_states.shape()).value();
    const DeviceBytes out(host.bytes());
    const Status status = experts->enqueue(nullptr, args(out.as(), dtype));
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    out.download(host.data());
    return host;
  }
};

inline std::unique_ptr<cuda::CudaExperts> create_on_device(const StandardCase& c) {
  const auto source = make_stacked_source(c.weights.view());
  auto made = cuda::CudaExperts::create(c.problem, *source, 0);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  return std::move(made).value();
}
inline Tensor run_cuda(const StandardCase& c, DType dtype = DType::kF32) {
  return OnDevice(c, create_on_device(c)).run(dtype);
}

inline MoeProblem problem_of(std::string_view quant, std::string_view activation,
                             std::int64_t hidden, std::int64_t intermediate, std::int64_t experts,
                             std::int64_t top_k) {
  MoeProblem p = small_problem(quant);
  p.num_experts = p.num_local_experts = experts;
  p.top_k = top_k;
  p.hidden_size = hidden;
  p.intermediate_size = intermediate;
  ActivationParams params;
  if (activation == "situ") params.beta = 4.0F;
  p.activation = make_activation(activation, params).value();
  return p;
}

}  // namespace moesaic::test
