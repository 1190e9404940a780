// What the stages of the bench share: sizes, workspace, how often to rotate.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "bench_stages.h"
#include "moesaic/experts.h"
#include "moesaic/numerics.h"

namespace moesaic::tool {

constexpr std::uint64_t kRoutingSeed = 0x9E37;

// A GPU's rotations together touch several times the 50 MB of its L2, so that experts come from
// memory: enough of them, or all experts.
constexpr double kPastTheCache = 256e6;
constexpr int kMostRotations = 32;

// Few tokens touch few experts: more rotations keep the touched weights out of the caches.
int rotations_for(std::int64_t tokens, const BenchSettings& settings);

// Of hidden states and results: the layer's own; of layers of F32 on a device bf16.
DType row_dtype(const BenchSettings& settings);

MoeProblem problem_of(const MoeLayerSpec& spec, std::int64_t max_tokens, int num_threads);

// Weights of one expert of that intermediate size, and the bytes that they are stored in.
double expert_weights(const MoeLayerSpec& spec, std::int64_t intermediate);
double expert_bytes(const MoeLayerSpec& spec, std::int64_t intermediate, const Scheme& quant);

// Experts that [tokens, k] I32 ids name.
void add_touched(const Tensor& ids, std::set<std::int32_t>& seen);
std::int64_t touched_experts(const Tensor& ids);

struct Workspace {
  static Result<Workspace> allocate(std::int64_t bytes);
  std::span<std::byte> span() { return {memory.data(), static_cast<std::size_t>(memory.bytes())}; }
  Tensor memory;
};

// kInternal when the point's error exceeds its bound: such a time is worth nothing.
// Of the one row that is checked: computed_bound of it, and as documented for calls of few rows, which
// scatter.
double bound_of_one_row(double bound, double activation, const RowNumerics& row);
Status upper_bound_check(const BenchPoint& point, std::string_view what);

// What skews a random gate's logits as --routing says; empty for uniform routing.
Result<std::vector<float>> routing_bias_of(const BenchSettings& settings);

Result<std::unique_ptr<BenchStage>> make_gate_stage(const BenchSettings& settings);
Result<std::unique_ptr<BenchStage>> make_route_stage(const BenchSettings& settings);
Result<std::unique_ptr<BenchStage>> make_experts_stage(const BenchSettings& settings);
Result<std::unique_ptr<BenchStage>> make_kernel_stage(const BenchSettings& settings);
Result<std::unique_ptr<BenchStage>> make_layer_stage(const BenchSettings& settings);

}  // namespace moesaic::tool
