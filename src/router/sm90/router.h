// The router on a Hopper GPU: what Router computes, on device memory. Only launches once created.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cuda/experts_prologue.h"
#include "moesaic/router.h"
#include "moesaic/status.h"
#include "router/sm90/route.h"

namespace moesaic::cuda {

// Device pointers of one call. Outputs overlap nothing.
struct CudaRouterArgs {
  std::int64_t tokens = 0;                     // M; 0 is ordinary
  const void* router_logits = nullptr;         // [M, E + zero experts] of logits_dtype
  DType logits_dtype = DType::kF32;            // F32, BF16 or F16
  ConstTensorView hidden_states = {};          // kCustom: what the function is given
  const std::int32_t* input_ids = nullptr;     // kHash: [M]
  const std::uint8_t* padding_mask = nullptr;  // [M] or null; non-zero rows get id -1, weight 0
  float* topk_weights = nullptr;               // [M, slots()]
  void* topk_ids = nullptr;                    // [M, slots()] of ids_dtype
  DType ids_dtype = DType::kI32;               // I32, U32 or I64; kCustom: I32
  bool keeps_nan = false;  // kLlama4: the weight of a NaN is NaN: a gate of shared experts
  // kZeroExpert: [M], the summed weight of identity experts; times the hidden states it is Router's
  // zero_expert_output.
  float* zero_expert_weight = nullptr;
};

class CudaRouter {
 public:
  // ok, or why the device cannot: kUnsupported for simulated routing (a host function) and, but
  // for custom routing, more than 1024 columns. Needs no device.
  static Status can_implement(const RoutingSpec& spec);
  // The same options as Router::create, with its checks; kUnsupported also for a capture callback
  // and for fused shared experts with custom routing. num_threads means nothing here. kDevice,
  // kOutOfMemory.
  static Result<std::unique_ptr<CudaRouter>> create(const Router::Options& options, int device);
  ~CudaRouter();
  CudaRouter(const CudaRouter&) = delete;
  CudaRouter& operator=(const CudaRouter&) = delete;

  // Ids and weights have the bits that Router gives for the same logits, for every method, also for
  // NaN, infinities and ties: every operation is the same in the same order. One difference: a
  // token id outside the hash table, which Router refuses, gives a row of id -1 and weight 0, and so
  // does a custom function's id that names nobody, for its slot.
  // Launches on `stream` of the device it was created on; capturable. kInvalidArgument (null
  // pointers, negative tokens), kLimitExceeded, kDevice when the launch fails.
  // `prologue`: of an experts stage that follows, run by the same launch; null: none. Up to 512
  // tokens.
  Status enqueue(void* stream, const CudaRouterArgs& args,
                 const ExpertsPrologue* prologue = nullptr) const;

  // The same call as parameters for a kernel that routes itself, which then writes ids and weights
  // too. Empty unless the method is kTopK or kGroupedTopK of softmax or sigmoid, without a mask or an
  // expert scale, groups are ranked as they are with or without a bias, and logits are F32.
  std::optional<RouteParams> usual(const CudaRouterArgs& args) const;

  std::int64_t slots() const;
  const RoutingSpec& spec() const;  // as in force: after the grouping fallback
  std::string name() const;         // as Router::name
  int device() const;

 private:
  struct Impl;
  explicit CudaRouter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::cuda
