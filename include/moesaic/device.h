// Devices: what there is to run on, and why something cannot be used. No framework or CUDA types.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moesaic/status.h"

namespace moesaic {

// A place to compute: this machine's CPUs, or one CUDA device by its index. A value; naming a
// device does not touch it.
class Device {
 public:
  static constexpr Device cpu() { return Device(false, 0); }
  // `index` as the CUDA runtime counts (CUDA_VISIBLE_DEVICES applies). A negative index names no
  // device: check_device refuses it.
  static constexpr Device cuda(int index) { return Device(true, index); }

  constexpr bool is_cuda() const { return is_cuda_; }
  constexpr int index() const { return index_; }  // 0 for the CPU
  bool operator==(const Device&) const = default;
  std::string to_string() const;  // "cpu", "cuda:0"

 private:
  constexpr Device(bool is_cuda, int index) : is_cuda_(is_cuda), index_(index) {}
  bool is_cuda_;
  int index_;
};

// A stream of the CUDA runtime (cudaStream_t) without its header; null is the default stream. Not
// owned.
struct Stream {
  void* handle = nullptr;
};

// "cpu", "cuda" (device 0) or "cuda:N"; kInvalidArgument for anything else.
Result<Device> parse_device(const std::string& text);

struct CudaDeviceInfo {
  int index = 0;
  std::string name;
  int sm_major = 0, sm_minor = 0;  // compute capability
  int num_sms = 0;
  std::int64_t total_bytes = 0;
  bool available = false;
  std::string reason;  // why not, when not available
};

struct CudaInfo {
  bool built = false;      // this library has the CUDA backends
  bool available = false;  // at least one device can be used
  std::string reason;      // why not, when not available
  int driver_version = 0;  // 1000 * major + 10 * minor, as the runtime reports; 0: no driver
  int runtime_version = 0;
  std::vector<CudaDeviceInfo> devices;
};

// Looks at the machine on every call. Creates no CUDA context, changes no current device and
// leaves no error behind. May be called from any thread.
CudaInfo query_cuda();

// ok for the CPU and for a usable Hopper device; otherwise kUnsupported (built without CUDA),
// kNotFound (no device of that index; the text says how many there are) or kDevice (no driver,
// another architecture).
Status check_device(Device device);

}  // namespace moesaic
