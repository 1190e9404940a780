// Golden files: inputs and outputs of MoE blocks recorded elsewhere, and the comparison with them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "exit_code.h"
#include "moesaic/checkpoint.h"
#include "moesaic/fused_moe.h"
#include "moesaic/status.h"

namespace moesaic::tool {

// One block of a golden file: <prefix>.input and <prefix>.output exist.
struct GoldenBlock {
  std::string prefix;  // "model.layers.1.mlp"
  int layer = -1;
};
// Blocks in ascending order of layers. kNotFound when the file has none.
// Where a model's golden file is: in its folder, beside a GGUF file.
std::string golden_beside(const std::string& model);

Result<std::vector<GoldenBlock>> golden_blocks(const TensorFile& file);

// An error and what it may be, both relative to the recorded values.
struct Comparison {
  double rel_l2 = 0, bound = 0;
  bool pass() const;  // not with a NaN, nor with a bound that is none
};

// The larger of the two; a NaN becomes, and stays, the worst.
void keep_worst(double& worst, double value);

struct LayerReport {
  int layer = -1;
  std::int64_t tokens = 0;
  double rel_l2 = 0, cosine = 0, max_abs = 0;  // the cosine of zeros with zeros is 1
  // Tokens whose experts differ from the golden's (or, without golden ids, from what float64
  // allows) although the scores are further apart than rounding explains.
  std::int64_t topk_mismatches = 0;
  // Tokens whose experts differ where both choices are within rounding; they do not enter rel_l2,
  // because another expert legitimately gives another output.
  std::int64_t near_ties = 0;
  std::string topk_source;  // "golden", "float64" or "none"
  // Where the golden has them: router logits, and the weights of tokens with the golden's experts.
  std::optional<Comparison> router_logits, topk_weights;
  double topk_weight_max_abs = 0;  // largest difference of such a weight
  // In force, relative to the output like rel_l2: the documented one, or one computed from what
  // rounding did to these rows (numerics.h) where that is beyond it; times `cancellation`.
  double bound = 0;
  double documented_bound = 0;
  // Norm of the parts of which the output is the sum, over that of the output, where it is above
  // 1.1: errors are relative to the parts.
  double cancellation = 1;
  NumericsSummary numerics;  // of the tokens that enter rel_l2
  double activation_bound = 0;
  bool pass = false;
  std::string quant, device, backend;
  std::string backend_note;  // slow_backend_note of the layer

  // Whether some token has the golden's experts: of others nothing is known of the output.
  bool compares_output() const { return near_ties < tokens; }
  // Sets `pass`: everything that was compared is within its bound, no choice is wrong, and outputs
  // were among it.
  void judge();
};

// Runs the block's layer and compares. The bound of a layer of a checkpoint that `convert` wrote into
// `model` is widened by the rounding of its weights. On failure `origin` tells whether a file or an option
// (backend, scheme) is to blame.
Result<LayerReport> verify_block(const Checkpoint& checkpoint, const std::string& model,
                                 const TensorFile& golden, const GoldenBlock& block,
                                 const FusedMoE::Options& options, Origin& origin);

}  // namespace moesaic::tool
