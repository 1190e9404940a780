// Who is to blame for a layer that could not be made: a file or an option.
#pragma once

#include "exit_code.h"
#include "moesaic/checkpoint.h"
#include "moesaic/status.h"

namespace moesaic::tool {

// Where the value came from for which making this layer of the checkpoint failed with `status`. What
// the layer fails with when no option is given stands in its files: config.json, or the router's
// tensors; the rest is an option's. (The reader says itself what is wrong with experts.)
Origin layer_origin(const Status& status, const Checkpoint& checkpoint, int layer);

}  // namespace moesaic::tool
