// moesaic.WeightLoader: a layer's weights, tensor by tensor from the caller's own loop.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "fork.h"
#include "moesaic/fused_moe.h"
#include "moesaic/weight_loader.h"

namespace moesaic::python {

struct LoaderObject {
  LoaderObject(WeightLoader made, const ParallelConfig& config)
      : loader(std::move(made)), parallel(config) {}
  WeightLoader loader;      // under `mutex`, which is taken without the GIL
  ParallelConfig parallel;  // what it was made with: the layer's, too
  // What finish() of the loader gave, while no layer has been made of it.
  std::optional<MoeLayerWeights> finished;
  std::int64_t finished_bytes = 0;
  std::mutex mutex;
};

// The weights that it holds, which it gives away once a layer with these options is sure to take
// them: `spec_of` says of which spec the layer would be made. After an error it is as before. Raises.
MoeLayerWeights finish(LoaderObject* self, const FusedMoE::Options& options,
                       MoeLayerSpec (*spec_of)(MoeLayerSpec, const FusedMoE::Options&));

void bind_weight_loader(nanobind::module_& m);

}  // namespace moesaic::python
