// The arguments of a layer's call, before an engine sees them: what is the same on every device.
#pragma once

#include <cstdint>

#include "layer/fused_plan.h"
#include "moesaic/fused_moe.h"

namespace moesaic::layer {

// hidden_states and outputs [B, T, H] as [B * T, H]; anything else as it is. kInvalidLayout where
// the rows of hidden_states are not equally far apart.
Result<FusedMoE::Args> as_matrices(const FusedMoE::Args& args);

// Which of the routing tensors are there, their dtypes, shapes and layout, that they are memory of
// `device` and apart from the output. Reads none of them. hidden_states is [M, H] already.
Status check_routing(const FusedPlan& plan, const FusedMoE::Args& args, Device device);
// That no trace tensor overlaps hidden_states, an output or another trace (kAliasing), of tensors
// whose shapes are checked. What it overlaps of the routing's inputs, check_routing says.
Status check_traces_apart(const FusedMoE::Args& args);
// The ids of host tensors that check_routing accepted.
Status check_routing_values(const FusedPlan& plan, const FusedMoE::Args& args);
// What stands in Args::shared_output, if anything: that there is such a part, shape, layout and that
// it is memory of `device`. Its dtype is the engine's matter.
Status check_shared_output(const FusedPlan& plan, const FusedMoE::Args& args, Device device);
// Whoever chose them: entry i of topk_ids.
std::int64_t id_at(const ConstTensorView& topk_ids, std::int64_t i);
// Whether row t counts as padding.
bool is_padding(const FusedMoE::Args& args, std::int64_t t);
// Nothing is added into rows of padding, whatever a shared expert made of them.
void forget_padding(const FusedMoE::Args& args);

// Rows [first, first + count) of a call, all its tensors.
FusedMoE::Args rows_of_call(const FusedMoE::Args& args, std::int64_t first, std::int64_t count);

}  // namespace moesaic::layer
