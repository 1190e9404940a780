// A call in the batched format on a GPU: the rows of a case as slabs, counts, and the same rows as
// tokens of one expert each.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "experts/gpu_call.h"
#include "moesaic/device_tensor.h"
#include "numerics/element.h"
#include "support/experts_run.h"

namespace moesaic::test {

using Counts = std::vector<std::int32_t>;

inline DeviceTensor on_gpu(const ConstTensorView& host) {
  return DeviceTensor::copy_of(host, kGpu).value();
}
inline void set_bytes(DeviceTensor& t, int byte) {
  EXPECT_EQ(cudaMemset(t.data(), byte, static_cast<std::size_t>(t.bytes())), cudaSuccess);
}

// The case's hidden states are E * T rows, with routing for top_k = 1: row r is row r % T of the slab
// of expert r / T.
struct SlabCall {
  StandardCase c;
  std::int64_t experts, rows;  // E, T
  std::unique_ptr<Experts> batched;
  DeviceTensor x, counts, output, workspace;

  SlabCall(StandardCase of, std::int64_t slab_rows, const char* backend = "cuda_sm90",
           DType out = DType::kBF16)
      : c(std::move(of)), experts(c.problem.num_experts), rows(slab_rows) {
    EXPECT_EQ(c.hidden_states.shape()[0], experts * rows);
    for (std::int64_t r = 0; r < experts * rows; ++r) {
      c.routing.ids.as<std::int32_t>()[r] = static_cast<std::int32_t>(r / rows);
      c.routing.weights.as<float>()[r] = 1.0F;
    }
    const MoeProblem p = problem();
    const auto source = make_stacked_source(c.weights.view());
    batched = choose_experts(p, backend).value()->create(p, *source).value();
    x = on_gpu(c.hidden_states.view());
    counts = DeviceTensor::uninitialized(kGpu, DType::kI32, {experts}).value();
    output = DeviceTensor::uninitialized(kGpu, out, shape()).value();
    workspace =
        DeviceTensor::uninitialized(kGpu, DType::kU8, {batched->workspace_size(rows).value()})
            .value();
  }
  MoeProblem problem(Device device = kGpu) const {
    MoeProblem p = c.problem;
    p.format = ActivationFormat::kBatched;
    p.max_tokens = rows;
    p.device = device;
    return p;
  }
  Shape shape() const { return {experts, rows, c.problem.hidden_size}; }
  std::int32_t live(const Counts& n, std::int64_t e) const {
    return std::clamp(n[static_cast<std::size_t>(e)], 0, static_cast<std::int32_t>(rows));
  }
  ExpertsArgs args() {
    ExpertsArgs a;
    a.hidden_states = ConstTensorView(x.view().data, x.view().dtype, shape(), kGpu);
    a.expert_num_tokens = {reinterpret_cast<const std::int32_t*>(counts.data()),
                           static_cast<std::size_t>(experts)};
    a.workspace = workspace.span();
    a.output = output.view();
    return a;
  }
  void set_counts(const Counts& n) {
    EXPECT_EQ(cudaMemcpy(counts.data(), n.data(), n.size() * 4, cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  // NaN in the rows past the counts and in all that a call writes.
  void poison(const Counts& n) {
    set_bytes(output, 0xFF);
    set_bytes(workspace, 0xFF);
    const std::int64_t row = x.bytes() / (experts * rows);
    for (std::int64_t e = 0; e < experts; ++e) {
      const std::int64_t at = e * rows + live(n, e);
      EXPECT_EQ(cudaMemset(x.data() + at * row, 0xFF,
                           static_cast<std::size_t>(((e + 1) * rows - at) * row)),
                cudaSuccess);
    }
  }
  // A call that must succeed, with these counts.
  Tensor run(const Counts& n) {
    poison(n);
    set_counts(n);
    const Status status = batched->run(args());
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Tensor got = on_host(output);
    x = on_gpu(c.hidden_states.view());
    return got;
  }
  // The rows that count are those of `want`, rounded to the output's dtype; the others as poison()
  // left them.
  void expect_rows(const Tensor& got, const Tensor& want, const Counts& n) const {
    const std::int64_t row = got.bytes() / (experts * rows);
    Tensor narrow = Tensor::zeros(got.dtype(), got.shape()).value();
    for (std::int64_t i = 0; i < experts * rows * c.problem.hidden_size; ++i) {
      store_from_f32(narrow.data(), narrow.dtype(), i, load_as_f32(want.data(), want.dtype(), i));
    }
    const std::vector<std::byte> untouched(static_cast<std::size_t>(row), std::byte{0xFF});
    std::int64_t wrong = 0, written = 0;
    for (std::int64_t r = 0; r < experts * rows; ++r) {
      const bool counts_too = r % rows < live(n, r / rows);
      const std::byte* const from = counts_too ? narrow.data() + r * row : untouched.data();
      const bool same = std::memcmp(got.data() + r * row, from, static_cast<std::size_t>(row)) == 0;
      (counts_too ? wrong : written) += same ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0) << "rows that differ";
    EXPECT_EQ(written, 0) << "rows past the counts were written";
  }
  // The batched experts of the CPU on the same slabs.
  Tensor of_cpu(const Counts& n) const {
    const MoeProblem p = problem(Device::cpu());
    const auto source = make_stacked_source(c.weights.view());
    const auto cpu = choose_experts(p, "cpu_reference").value()->create(p, *source).value();
    Tensor want = Tensor::zeros(DType::kF32, shape()).value();
    Tensor memory = poisoned_bytes(cpu->workspace_size(rows).value());
    Counts clamped;
    for (std::int64_t e = 0; e < experts; ++e) clamped.push_back(live(n, e));
    ExpertsArgs a;
    a.hidden_states = ConstTensorView(c.hidden_states.data(), c.hidden_states.dtype(), shape());
    a.expert_num_tokens = clamped;
    a.workspace = {memory.data(), static_cast<std::size_t>(memory.bytes())};
    a.output = want.view();
    const Status status = cpu->run(a);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return want;
  }
  // All rows in the standard format, by a backend of the GPU.
  Tensor of_standard(const char* backend = "cuda_sm90") const {
    MoeProblem p = problem();
    p.format = ActivationFormat::kStandard;
    p.max_tokens = experts * rows;
    const auto source = make_stacked_source(c.weights.view());
    const auto standard = choose_experts(p, backend).value()->create(p, *source).value();
    const DeviceTensor ids = on_gpu(c.routing.ids.view());
    const DeviceTensor weights = on_gpu(c.routing.weights.view());
    DeviceTensor memory = DeviceTensor::uninitialized(
                              kGpu, DType::kU8, {standard->workspace_size(p.max_tokens).value()})
                              .value();
    DeviceTensor y =
        DeviceTensor::uninitialized(kGpu, output.view().dtype, c.hidden_states.shape()).value();
    ExpertsArgs a;
    a.hidden_states = x.view();
    a.topk_ids = ids.view();
    a.topk_weights = weights.view();
    a.workspace = memory.span();
    a.output = y.view();
    const Status status = standard->run(a);
    EXPECT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return on_host(y);
  }
};

}  // namespace moesaic::test
