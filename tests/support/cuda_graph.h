// A stream of its own and a graph of what was launched on it, for tests.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "moesaic/device.h"
#include "moesaic/status.h"

namespace moesaic::test {

class CudaGraph {
 public:
  CudaGraph() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  ~CudaGraph() {
    if (exec_ != nullptr) (void)cudaGraphExecDestroy(exec_);
    (void)cudaStreamDestroy(stream_);
  }

  cudaStream_t stream() const { return stream_; }
  Stream of_call() const { return {stream_}; }
  // launch(): Status of what goes on the stream. It runs once first, for what is loaded then.
  template <class Launch>
  void capture(const Launch& launch) {
    const Status eager = launch();
    EXPECT_TRUE(eager.ok()) << eager.to_string();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), cudaSuccess);
    const Status captured = launch();
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    EXPECT_TRUE(captured.ok()) << captured.to_string();
    EXPECT_EQ(cudaGraphInstantiate(&exec_, graph, 0), cudaSuccess);
    (void)cudaGraphDestroy(graph);
  }
  void replay() const { EXPECT_EQ(cudaGraphLaunch(exec_, stream_), cudaSuccess); }
  void wait() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace moesaic::test
