// Device memory for tests of the CUDA backends, and the visible skip without a device.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "moesaic/device.h"

// First line of a test that needs a Hopper GPU.
#define REQUIRE_HOPPER() \
  if (!query_cuda().available) GTEST_SKIP() << "needs a Hopper GPU: " << query_cuda().reason

namespace moesaic::test {

// Poisoned device memory with a margin behind it.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    EXPECT_EQ(cudaMalloc(&data_, bytes_ + kMargin), cudaSuccess);
    poison();
  }
  DeviceBytes(const void* host, std::int64_t bytes) : DeviceBytes(bytes) { upload(host); }
  template <class T>
  explicit DeviceBytes(const std::vector<T>& host)
      : DeviceBytes(host.data(), static_cast<std::int64_t>(host.size() * sizeof(T))) {}
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { (void)cudaFree(data_); }

  // NaN in every float format.
  void poison() { EXPECT_EQ(cudaMemset(data_, 0xFF, bytes_ + kMargin), cudaSuccess); }
  void upload(const void* host) {
    EXPECT_EQ(cudaMemcpy(data_, host, bytes_, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // it may still be on its way
  }
  void download(void* host) const {
    EXPECT_EQ(cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }
  template <class T>
  std::vector<T> values() const {
    std::vector<T> host(bytes_ / sizeof(T));
    download(host.data());
    return host;
  }
  // Nothing was written behind the end.
  bool margin_is_intact() const {
    std::vector<unsigned char> margin(kMargin);
    EXPECT_EQ(cudaMemcpy(margin.data(), static_cast<std::byte*>(data_) + bytes_, kMargin,
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    for (const unsigned char b : margin) {
      if (b != 0xFF) return false;
    }
    return true;
  }
  template <class T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  static constexpr std::size_t kMargin = 256;
  void* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace moesaic::test
