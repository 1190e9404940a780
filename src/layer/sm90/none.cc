// A build without CUDA: the engine stands in the catalogue and refuses.
#include "layer/sm90/layer.h"

namespace moesaic::cuda {

Result<std::unique_ptr<layer::LayerEngine>> make_sm90_engine(const layer::EngineParts& parts) {
  return check_device(parts.options.device);
}

}  // namespace moesaic::cuda
