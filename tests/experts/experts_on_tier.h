// Experts of the fast CPU backends, tier by tier, and one call of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/experts.h"
#include "support/experts_run.h"
#include "support/random.h"

namespace moesaic::test {

// Those that this machine has.
std::vector<std::string> tiers();

// On two threads, for up to 64 tokens.
MoeProblem make_problem(std::string_view quant, std::int64_t h, std::int64_t i,
                        std::int64_t experts, std::int64_t k);

// Poisoned, with a margin behind it.
struct Workspace {
  explicit Workspace(std::int64_t bytes)
      : tensor(Tensor::uninitialized(DType::kU8, {bytes + 64}).value()),
        size(static_cast<std::size_t>(bytes)) {
    test::poison(tensor.view());
  }
  std::span<std::byte> span() { return {tensor.data(), size}; }
  Tensor tensor;
  std::size_t size;
};

std::unique_ptr<Experts> make(const std::string& tier, const MoeProblem& p,
                              const OwnedExpertWeights& w);
Tensor run_standard(const Experts& experts, const MoeProblem& p, ConstTensorView x,
                    const OwnedRouting& routing, DType out_dtype,
                    std::span<const std::int32_t> expert_map = {},
                    std::span<RowNumerics> numerics = {});

}  // namespace moesaic::test
