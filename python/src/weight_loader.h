// moesaic.WeightLoader: a layer's weights, tensor by tensor from the caller's own loop.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <utility>

#include "fork.h"
#include "moesaic/weight_loader.h"

namespace moesaic::python {

struct LoaderObject {
  LoaderObject(WeightLoader made, const ParallelConfig& config)
      : loader(std::move(made)), parallel(config) {}
  WeightLoader loader;      // under `mutex`, which is taken without the GIL
  ParallelConfig parallel;  // what it was made with: the layer's, too
  std::mutex mutex;
};

// The weights that it holds, which it gives away; after an error it is as before.
Result<MoeLayerWeights> finish(LoaderObject* self);

void bind_weight_loader(nanobind::module_& m);

}  // namespace moesaic::python
