// A build without CUDA: no GPU is found, and what would touch one refuses.
#include "cuda/device_memory.h"
#include "moesaic/device.h"

namespace moesaic {

CudaInfo query_cuda() {
  CudaInfo info;
  info.reason = "this build has no CUDA backend";
  return info;
}

namespace cuda {
namespace {

Status no_backend() { return {StatusCode::kUnsupported, query_cuda().reason}; }

}  // namespace

Allocation::~Allocation() = default;
void Allocation::release() {}
Status Allocation::reserve(std::string_view, std::int64_t) { return no_backend(); }

DeviceScope::DeviceScope(int device) : device_(device) {}
DeviceScope::~DeviceScope() = default;
Status DeviceScope::status() const { return no_backend(); }

Status copy_in_order(std::string_view, void*, const void*, std::int64_t, void*) {
  return no_backend();
}
Status synchronize(void*) { return no_backend(); }

}  // namespace cuda
}  // namespace moesaic
