// Experts::enqueue: the call of a GPU's backends, by the name that all stages give it.
#include <fmt/format.h>

#include "core/refusal.h"
#include "moesaic/experts.h"

namespace moesaic {

Status Experts::enqueue(Stream stream, const ExpertsArgs& args) const {
  if (!args.hidden_states.device.is_cuda()) {
    return unsupported(fmt::format("enqueue: got memory of {} for {}, need a GPU's",
                                   args.hidden_states.device.to_string(), name()));
  }
  ExpertsArgs on_stream = args;
  on_stream.stream = stream;
  return run(on_stream);
}

}  // namespace moesaic
