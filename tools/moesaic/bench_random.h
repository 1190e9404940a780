// Random layers and routings for benchmarks: weights drawn from a seed, one expert at a time, so
// that a layer of any size needs no second copy.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/experts.h"
#include "moesaic/spec.h"
#include "moesaic/tensor.h"

namespace moesaic::tool {

// Normal weights scaled so that pre-activations have a standard deviation of about 1; e4m3 codes
// with random block scales for fp8. The same seed gives the same weights on every machine; an
// expert may be asked for again.
std::unique_ptr<ExpertSource> make_random_source(const MoeProblem& problem, std::uint64_t seed);

// The shared expert of a layer with this spec, stored as the others; null without one.
std::unique_ptr<ExpertSource> make_random_shared_source(const MoeLayerSpec& spec,
                                                        std::uint64_t seed);

// Gates, biases and norms of a layer with this spec. A spec with has_router_bias gets one of
// standard deviation 0.1, plus routing_bias when that is not empty.
Result<MoeLayerTensors> random_layer_tensors(const MoeLayerSpec& spec, std::uint64_t seed,
                                             std::span<const float> routing_bias = {});

// What to add to logits of standard deviation 1 so that a top-k router spreads tokens as
// random_routing(kind) does: empty for "uniform"; -S log(r) for the expert of popularity rank r
// ("zipf:S"; normal logits make this close to, not exactly, the Zipf law); -30 for all but the
// first top_k experts ("one"). num_logits >= num_experts; entries past the experts are 0.
Result<std::vector<float>> routing_bias(std::string_view kind, std::int64_t num_experts,
                                        std::int64_t num_logits, std::int64_t top_k);

// N(0, 1) in BF16, F16 or F32.
Result<Tensor> random_tensor(DType dtype, const Shape& shape, double sd, std::uint64_t seed);

struct Routing {
  Tensor ids;      // [M, k] I32, distinct inside a row
  Tensor weights;  // [M, k] F32, sum 1
};
// kInvalidArgument unless kind is one of those that random_routing knows.
Status check_routing_name(std::string_view kind);
// "uniform", "zipf:S" (popularity of the r-th expert ~ 1/r^S, in an order drawn from the seed) or
// "one" (all tokens choose experts 0..k-1). kInvalidArgument for anything else.
Result<Routing> random_routing(std::string_view kind, std::int64_t tokens, std::int64_t num_experts,
                               std::int64_t top_k, std::uint64_t seed);

}  // namespace moesaic::tool
