// Functions of the caller's that take part in the work of a GPU. They put work on a stream and
// return; nobody waits for it on the host.
#pragma once

#include <functional>

#include "moesaic/device.h"
#include "moesaic/status.h"
#include "moesaic/tensor.h"

namespace moesaic {

// Makes `out` of `in`, both contiguous memory of one GPU, by work on `stream`: launches there, or
// elsewhere with events that order it. `in` is not written, all of `out` is. Called with the current
// device set, once for each call of a layer or router that has rows. While the stream is being
// captured, only what can be captured may be put on it, and the graph's replays run that again
// without this function. A failure, or anything it throws (kInvalidArgument), is the call's.
using DeviceFn = std::function<Status(Stream stream, ConstTensorView in, TensorView out)>;

// Sees what is in `in`, memory of one GPU that is not written, by work on `stream`; the rest as
// above.
using DeviceViewFn = std::function<Status(Stream stream, ConstTensorView in)>;

// The same for routing: hidden_states [M, H] (absent where a router was given none), router_logits
// [M, E] of the dtype in which the router got them, to topk_weights [M, k] F32 and topk_ids [M, k]
// I32. Ids are logical; what is not in 0 to E - 1 counts as -1, an empty slot, whose weight is not
// read.
using DeviceRoutingFn = std::function<Status(Stream stream, ConstTensorView hidden_states,
                                             ConstTensorView router_logits, bool renormalize,
                                             TensorView topk_weights, TensorView topk_ids)>;

}  // namespace moesaic
