// Device discovery: it must answer, with reasons, on every machine, GPU or not.
#include "moesaic/device.h"

#include <gtest/gtest.h>

namespace moesaic {
namespace {

TEST(Device, NamesRoundTrip) {
  for (const char* text : {"cpu", "cuda:0", "cuda:7"}) {
    const Result<Device> device = parse_device(text);
    ASSERT_TRUE(device.ok()) << device.status().to_string();
    EXPECT_EQ(device->to_string(), text);
  }
  EXPECT_EQ(parse_device("cuda").value(), Device::cuda(0));
  EXPECT_FALSE(Device::cpu() == Device::cuda(0));
}

TEST(Device, OtherNamesAreRefused) {
  for (const char* text :
       {"", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda: 1", "CUDA", "cuda:99999999999"}) {
    const Result<Device> device = parse_device(text);
    ASSERT_FALSE(device.ok()) << text;
    EXPECT_EQ(device.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(device.status().message().find("need cpu, cuda or cuda:N"), std::string::npos);
  }
}

TEST(Device, CpuIsAlwaysUsable) { EXPECT_TRUE(check_device(Device::cpu()).ok()); }

TEST(Device, WhatIsNotAvailableHasAReason) {
  const CudaInfo info = query_cuda();
#if defined(MOESAIC_HAS_CUDA)
  EXPECT_TRUE(info.built);
  EXPECT_GE(info.runtime_version, 12040);
#else
  EXPECT_FALSE(info.built);
  EXPECT_TRUE(info.devices.empty());
#endif
  EXPECT_EQ(info.reason.empty(), info.available) << info.reason;
  bool any = false;
  for (const CudaDeviceInfo& d : info.devices) {
    EXPECT_EQ(d.reason.empty(), d.available) << d.reason;
    EXPECT_EQ(check_device(Device::cuda(d.index)).ok(), d.available);
    any = any || d.available;
  }
  EXPECT_EQ(any, info.available);
}

TEST(Device, IndicesThatNoDeviceHasAreNamedAsGiven) {
  for (const int index : {-1, -2, -5}) {
    const Device device = Device::cuda(index);
    EXPECT_TRUE(device.is_cuda());
    EXPECT_FALSE(device == Device::cpu());
    EXPECT_EQ(device.index(), index);
    EXPECT_EQ(device.to_string(), "cuda:" + std::to_string(index));
  }
  EXPECT_EQ(Device::cpu().index(), 0);
  EXPECT_FALSE(Device::cuda(0) == Device::cpu());
}

TEST(Device, MissingDeviceIsRefusedWithTheReason) {
  const CudaInfo info = query_cuda();
  for (const Device device : {Device::cuda(4096), Device::cuda(-1)}) {
    const Status status = check_device(device);
    ASSERT_FALSE(status.ok());
    const bool none = info.devices.empty();
    EXPECT_EQ(status.code(), !info.built ? StatusCode::kUnsupported
                             : none      ? StatusCode::kDevice
                                         : StatusCode::kNotFound);
    EXPECT_NE(status.message().find(none ? info.reason : "need an index below"), std::string::npos)
        << status.to_string();
  }
}

}  // namespace
}  // namespace moesaic
