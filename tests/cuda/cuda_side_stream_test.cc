// Streams beside those of calls. Skipped, visibly, without a device.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "cuda/side_stream.h"
#include "support/cuda_device.h"

namespace moesaic::cuda {
namespace {

int priority_of(void* stream) {
  int priority = 1;
  EXPECT_EQ(cudaStreamGetPriority(static_cast<cudaStream_t>(stream), &priority), cudaSuccess);
  return priority;
}

// Else kernels of both could keep multiprocessors from each other, for ever.
TEST(SideStreams, HaveThePriorityOfTheCallsStream) {
  REQUIRE_HOPPER();
  int least = 0, greatest = 0;
  ASSERT_EQ(cudaDeviceGetStreamPriorityRange(&least, &greatest), cudaSuccess);
  ASSERT_LT(greatest, least);
  SideStreams sides;
  ASSERT_TRUE(sides.create().ok());
  void* const usual = sides.beside(nullptr).value()->handle();
  EXPECT_EQ(priority_of(usual), 0);
  for (int priority = least; priority >= greatest; --priority) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority), cudaSuccess);
    // The first call of a priority may be a captured one.
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const Result<SideStream*> side = sides.beside(stream);
    Status status = side.status();
    if (status.ok()) status = (*side)->fork(stream);
    if (status.ok()) status = (*side)->join(stream);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_TRUE(status.ok()) << status.to_string();
    EXPECT_EQ(priority_of((*side)->handle()), priority);
    EXPECT_EQ((*side)->handle() == usual, priority == 0);
    EXPECT_EQ(sides.beside(stream).value(), *side);
    (void)cudaGraphDestroy(graph);
    (void)cudaStreamDestroy(stream);
  }
}

}  // namespace
}  // namespace moesaic::cuda
