// The layer of the NCCL bench: DeepSeek-V3's shape in FP8 blocks.
#pragma once

#include "moesaic/fused_moe.h"
#include "moesaic/parallel.h"
#include "nccl_ranks.h"

namespace moesaic::bench {

// bf16 values, roughly normal.
Tensor random_rows(std::int64_t rows, std::int64_t columns, double deviation, std::uint64_t seed);

// Once, before the weights of any layer.
void prepare_layer_weights();
// Of a rank's experts.
MoeLayerWeights layer_weights(const Settings& settings, const ParallelConfig& parallel);

// Runs a layer on device tensors, fp32 out.
struct LayerCall {
  std::int64_t rows;
  DeviceArray x, y;
  explicit LayerCall(const Tensor& host);
  void enqueue(const FusedMoE& layer, cudaStream_t stream) const;
  // On the default stream, to its end.
  void run(const FusedMoE& layer) const;
  std::vector<float> output() const {
    return y.host<float>(static_cast<std::size_t>(rows * kHidden));
  }
};

}  // namespace moesaic::bench
