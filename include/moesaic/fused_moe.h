// FusedMoE: the whole layer, from hidden states to output, on one process. Gate, router, modular
// kernel, shared experts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/experts.h"
#include "moesaic/parallel.h"
#include "moesaic/router.h"
#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic {

// Latent MoE: maps hidden states [M, H_in] to what the routed experts see [M, H]; shared experts
// keep the original.
using RoutedInputTransform =
    std::function<Status(ConstTensorView hidden_states, TensorView routed_input)>;

class FusedMoE {
 public:
  struct Options {
    std::string quant = "as-is";  // --quant name; "as-is": the scheme the weights are stored in
    std::string backend;          // force one experts backend by name
    std::int64_t max_tokens =
        512;  // tokens per forward call that the workspace allows; larger calls are split
    int num_threads = 0;  // 0: one per core this process may use
    ParallelConfig parallel;
    bool include_shared =
        true;  // false on all ranks but one when partial results of ranks are summed
    RoutedInputTransform routed_input_transform;
    std::int64_t transformed_hidden_size = 0;  // H of the routed experts when a transform is set
    ProgressFn progress;
  };

  static Result<FusedMoE> from_checkpoint(const Checkpoint& checkpoint, int layer,
                                          const Options& options);
  // From loaded weights; consumes the source.
  static Result<FusedMoE> create(MoeLayerWeights weights, const Options& options);

  // What a forward call may report besides its output. All views optional.
  struct Trace {
    TensorView router_logits;  // [M, E] F32
    TensorView topk_weights;   // [M, k] F32
    TensorView topk_ids;       // [M, k] I32, logical
  };
  // hidden_states [M, H] F32, BF16 or F16; output [M, H] F32, BF16 or F16, must not alias
  // hidden_states. The result of a row depends on that row alone: bit-identical for any batch,
  // split, order or thread count. With parallel sizes > 1 the output is this rank's partial sum.
  Status forward(ConstTensorView hidden_states, TensorView output, const Trace& trace) const;
  Status forward(ConstTensorView hidden_states, TensorView output) const {
    return forward(hidden_states, output, Trace{});
  }

  const MoeLayerSpec& spec() const;
  const QuantScheme& quant() const;  // the scheme in force
  std::string experts_backend() const;
  std::int64_t workspace_bytes() const;
  std::int64_t weight_bytes() const;             // resident, all stages
  std::vector<CandidateReport> explain() const;  // every stage, in order
  std::string determinism() const;

  FusedMoE(FusedMoE&&) noexcept;
  FusedMoE& operator=(FusedMoE&&) noexcept;
  ~FusedMoE();

 private:
  struct Impl;
  explicit FusedMoE(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The catalogue for a layer that has no weights yet (explain --shape).
Result<std::vector<CandidateReport>> explain_layer(const MoeLayerSpec& spec,
                                                   const FusedMoE::Options& options);

}  // namespace moesaic
