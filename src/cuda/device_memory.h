// Device memory, the current device and errors of the CUDA runtime, for host code that launches
// kernels. No CUDA types: error codes are ints (cudaError_t values), streams void*.
#pragma once

#include <cstdint>
#include <string_view>

#include "cuda/device_traits.h"
#include "moesaic/status.h"

namespace moesaic::cuda {

// ok for 0, else kOutOfMemory or kDevice with `what` and the runtime's text. Clears the error that
// the failed call left behind, so that later calls do not report it again.
Status check_call(std::string_view what, int error);

// Device memory of one object, freed with it.
class Allocation {
 public:
  Allocation() = default;
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  Allocation(Allocation&& other) noexcept;
  Allocation& operator=(Allocation&& other) noexcept;
  ~Allocation();

  // On the current device; frees what was there. 0 bytes: nothing. kOutOfMemory names `what` and
  // the bytes.
  Status reserve(std::string_view what, std::int64_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  void release();
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
  int device_ = 0;
};

// Host memory that kernels can write to.
class PinnedHost {
 public:
  PinnedHost() = default;
  PinnedHost(const PinnedHost&) = delete;
  PinnedHost& operator=(const PinnedHost&) = delete;
  ~PinnedHost();
  // Once. kOutOfMemory names `what` and the bytes.
  Status reserve(std::string_view what, std::int64_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int device_ = 0;
};

// Makes a device the current one of this thread; at the end of the scope the thread has the context
// that it had before, also none: to make a device current that nobody uses would take half a GB of it.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope();
  Status status() const;

 private:
  int device_ = 0;
  int error_ = 0;
  bool pushed_ = false;
};

// For what is let go of later, when another device may be current; 0 where none can be.
int current_device();

// Blocking copies between host and device.
Status copy_to_device(std::string_view what, void* to, const void* from, std::int64_t bytes);
Status copy_to_host(std::string_view what, void* to, const void* from, std::int64_t bytes);
// Wherever the two lie: after what is on the stream, waiting for nothing else.
Status copy_in_order(std::string_view what, void* to, const void* from, std::int64_t bytes,
                     void* stream);
// Reserves and fills.
Status upload(std::string_view what, const void* from, std::int64_t bytes, Allocation& to);
// On a stream, without waiting; capturable.
Status copy_on_device(std::string_view what, void* to, const void* from, std::int64_t bytes,
                      void* stream);
// The same for rows of row_bytes that lie apart by their pitch.
Status copy_rows_on_device(std::string_view what, void* to, std::int64_t to_pitch, const void* from,
                           std::int64_t from_pitch, std::int64_t row_bytes, std::int64_t rows,
                           void* stream);
// Zeros on a stream, without waiting; capturable.
Status fill_zero(std::string_view what, void* to, std::int64_t bytes, void* stream);
// kUnsupported while the stream is being captured into a graph, for work that waits on the host.
Status check_not_capturing(void* stream);
// Waits for everything on the stream.
Status synchronize(void* stream);

// Multiprocessors of a usable device, or kDevice: no such device, or not compute capability 9.0.
Result<int> require_hopper(int device);
// Of the current device. kDevice where there is none.
Result<DeviceTraits> current_device_traits();

// `p` must be memory of this device and aligned: kInvalidArgument (null, host memory, or another
// device's: the text says which), kInvalidLayout. Allowed during capture.
Status check_device_pointer(std::string_view field, const void* p, std::int64_t alignment,
                            int device);

}  // namespace moesaic::cuda
