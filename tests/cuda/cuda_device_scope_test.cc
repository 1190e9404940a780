// A scope with another device current: what the thread has afterwards. Skipped, visibly, without one.
#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <thread>

#include "cuda/device_memory.h"
#include "cuda/driver.h"
#include "support/cuda_device.h"

namespace moesaic::cuda {
namespace {

template <class Function>
Function driver(const char* name) {
  return reinterpret_cast<Function>(driver_function(name, 7000).value());
}
CUcontext current() {
  CUcontext context = nullptr;
  const auto get = driver<CUresult (*)(CUcontext*)>("cuCtxGetCurrent");
  EXPECT_EQ(get(&context), CUDA_SUCCESS);
  return context;
}
bool is_used(int device) {
  unsigned flags = 0;
  int active = 0;
  const auto get = driver<CUresult (*)(CUdevice, unsigned*, int*)>("cuDevicePrimaryCtxGetState");
  EXPECT_EQ(get(device, &flags, &active), CUDA_SUCCESS);
  return active != 0;
}
int last_device() {
  int count = 0;
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  return count - 1;
}
void allocate_in_a_scope(int device) {
  const DeviceScope scope(device);
  ASSERT_TRUE(scope.status().ok()) << scope.status().to_string();
  int now = -1;
  EXPECT_EQ(cudaGetDevice(&now), cudaSuccess);
  EXPECT_EQ(now, device);
  Allocation some;
  EXPECT_TRUE(some.reserve("test", 256).ok());
  EXPECT_TRUE(fill_zero("test", some.as<void>(), 256, nullptr).ok());
  EXPECT_TRUE(synchronize(nullptr).ok());
}

// Before all others: they use the first device.
TEST(DeviceScope, MakesNoContextOnTheFirstDevice) {
  REQUIRE_HOPPER();
  if (last_device() == 0) GTEST_SKIP() << "one CUDA device";
  ASSERT_FALSE(is_used(0));
  allocate_in_a_scope(last_device());
  EXPECT_TRUE(is_used(last_device()));
  EXPECT_FALSE(is_used(0));
}

TEST(DeviceScope, AThreadHasTheContextThatItHad) {
  REQUIRE_HOPPER();
  std::thread([] {
    EXPECT_EQ(current(), nullptr);
    allocate_in_a_scope(last_device());
    EXPECT_EQ(current(), nullptr);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    const CUcontext mine = current();
    EXPECT_NE(mine, nullptr);
    {
      const DeviceScope outer(last_device());
      const CUcontext outside = current();
      allocate_in_a_scope(0);
      EXPECT_EQ(current(), outside);
    }
    EXPECT_EQ(current(), mine);
  }).join();
}

TEST(DeviceScope, ADeviceThatIsNotThereIsNamed) {
  REQUIRE_HOPPER();
  const CUcontext before = current();
  {
    const DeviceScope scope(4096);
    EXPECT_EQ(scope.status().code(), StatusCode::kDevice);
    EXPECT_NE(scope.status().message().find("device 4096"), std::string::npos);
  }
  EXPECT_EQ(current(), before);
}

}  // namespace
}  // namespace moesaic::cuda
