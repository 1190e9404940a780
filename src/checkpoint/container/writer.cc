// write_safetensors: the reference writer's bytes, put in place atomically.
#include <fmt/format.h>

#include <utility>
#include <vector>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/output_file.h"
#include "checkpoint/container/safetensors_layout.h"
#include "moesaic/checkpoint.h"

namespace moesaic {

Status write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                         std::span<const std::pair<std::string, std::string>> metadata) {
  return checkpoint::guard_allocation(path, [&]() -> Status {
    std::vector<checkpoint::TensorSpec> specs;
    specs.reserve(tensors.size());
    for (const NamedTensor& t : tensors) {
      MOESAIC_RETURN_IF_ERROR(expect_contiguous(t.name, t.tensor).with_context(path));
      MOESAIC_RETURN_IF_ERROR(expect_device(t.name, t.tensor, Device::cpu()).with_context(path));
      specs.push_back({t.name, t.tensor.dtype, t.tensor.shape});
    }
    auto layout = checkpoint::layout_safetensors(specs, metadata);
    if (!layout.ok()) return layout.status().with_context(path);
    for (const checkpoint::SafetensorsLayout::Place& p : layout->places) {
      if (p.bytes == 0 || tensors[p.tensor].tensor.data != nullptr) continue;
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: tensor {}: has no data, need {} bytes", path,
                          checkpoint::quote_name(tensors[p.tensor].name), p.bytes)};
    }
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::OutputTarget target, checkpoint::find_output(path));
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::OutputFile file,
                             checkpoint::OutputFile::create(std::move(target)));
    MOESAIC_RETURN_IF_ERROR(file.write(layout->header.data(), layout->header.size()));
    for (const checkpoint::SafetensorsLayout::Place& p : layout->places) {
      MOESAIC_RETURN_IF_ERROR(file.write(tensors[p.tensor].tensor.data, p.bytes));
    }
    return file.commit();
  });
}

}  // namespace moesaic
