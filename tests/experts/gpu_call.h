// A call of a GPU's experts with its tensors there, and what becomes of it.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "moesaic/device_tensor.h"
#include "support/experts_run.h"

namespace moesaic::test {

inline constexpr Device kGpu = Device::cuda(0);

inline Tensor on_host(const DeviceTensor& t) {
  Tensor host = Tensor::zeros(t.view().dtype, t.view().shape).value();
  EXPECT_TRUE(copy_tensor(t.view(), host.view()).ok());
  return host;
}

// A case with its tensors on the GPU; the experts are those of a row of the catalogue.
struct GpuCall {
  StandardCase c;
  std::unique_ptr<Experts> experts;
  DeviceTensor x, ids, weights, map, output, workspace;

  GpuCall(const char* quant, std::int64_t tokens, std::int64_t local_experts,
          const char* backend = "cuda_sm90")
      : GpuCall(make_case(5, small_problem(quant), tokens, DType::kBF16, 0.1), local_experts,
                backend) {}
  GpuCall(StandardCase of, std::int64_t local_experts, const char* backend = "cuda_sm90")
      : c(std::move(of)) {
    const std::int64_t tokens = c.hidden_states.shape()[0];
    c.problem.num_local_experts = local_experts;
    c.problem.device = kGpu;
    const ExpertsBackend* const row = choose_experts(c.problem, backend).value();
    const auto source = make_stacked_source(c.weights.view());
    experts = row->create(c.problem, *source).value();
    x = DeviceTensor::copy_of(c.hidden_states.view(), kGpu).value();
    ids = DeviceTensor::copy_of(c.routing.ids.view(), kGpu).value();
    weights = DeviceTensor::copy_of(c.routing.weights.view(), kGpu).value();
    output = DeviceTensor::uninitialized(kGpu, DType::kF32, c.hidden_states.shape()).value();
    const std::int64_t bytes = experts->workspace_size(tokens).value();
    EXPECT_EQ(bytes, row->workspace_size(c.problem, tokens).value());
    workspace = DeviceTensor::uninitialized(kGpu, DType::kU8, {bytes}).value();
    if (local_experts == c.problem.num_experts) return;
    Tensor host = Tensor::zeros(DType::kI32, {c.problem.num_experts}).value();
    for (std::int32_t e = 0; e < c.problem.num_experts; ++e) {
      host.as<std::int32_t>()[e] = e < local_experts ? e : -1;
      c.expert_map.push_back(e < local_experts ? e : -1);
    }
    map = DeviceTensor::copy_of(host.view(), kGpu).value();
  }
  ExpertsArgs args() {
    ExpertsArgs a;
    a.hidden_states = x.view();
    a.topk_ids = ids.view();
    a.topk_weights = weights.view();
    a.expert_map = {reinterpret_cast<const std::int32_t*>(map.data()),
                    static_cast<std::size_t>(map.bytes() / 4)};
    a.workspace = workspace.span();
    a.output = output.view();
    return a;
  }
  Tensor result() const { return on_host(output); }
  // NaN in whatever a call does not write.
  void poison() {
    for (DeviceTensor* t : {&output, &workspace}) {
      EXPECT_EQ(cudaMemset(t->data(), 0xFF, static_cast<std::size_t>(t->bytes())), cudaSuccess);
    }
  }
  // A call that must succeed.
  Tensor run(const ExpertsArgs& a) {
    poison();
    const Status status = experts->run(a);
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_TRUE(synchronize(kGpu, a.stream).ok());
    return result();
  }
};

// What the CPU's reference measures of a case's rows.
inline std::vector<RowNumerics> reference_numerics(const StandardCase& c) {
  const std::int64_t tokens = c.hidden_states.shape()[0];
  const auto reference = make_backend("cpu_reference", c);
  const Tensor workspace = poisoned_bytes(reference->workspace_size(tokens).value());
  Tensor output = Tensor::zeros(DType::kF32, c.hidden_states.shape()).value();
  std::vector<RowNumerics> rows(static_cast<std::size_t>(tokens));
  ExpertsArgs a;
  a.hidden_states = c.hidden_states.view();
  a.topk_ids = c.routing.ids.view();
  a.topk_weights = c.routing.weights.view();
  a.workspace = {const_cast<std::byte*>(workspace.data()),
                 static_cast<std::size_t>(workspace.bytes())};
  a.output = output.view();
  a.numerics = rows;
  const Status status = reference->run(a);
  EXPECT_TRUE(status.ok()) << status.to_string();
  return rows;
}

}  // namespace moesaic::test
