// Device memory for the work of one call on a stream.
#pragma once

#include <cstdint>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic::cuda {

// Taken from and given back to the current device's memory pool in the order of a stream, without
// waiting; capturable (the graph then holds the memory). Work that uses it is put on that stream
// while the object lives.
class StreamAllocation {
 public:
  explicit StreamAllocation(void* stream) : stream_(stream) {}
  StreamAllocation(const StreamAllocation&) = delete;
  StreamAllocation& operator=(const StreamAllocation&) = delete;
  ~StreamAllocation();

  // Once. kOutOfMemory names `what` and the bytes.
  Status reserve(std::string_view what, std::int64_t bytes);
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* stream_;
  void* data_ = nullptr;
};

}  // namespace moesaic::cuda
