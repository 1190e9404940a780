// What the bench verb times: one stage of a layer, prepared for a number of tokens, with its
// correctness check.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ceilings.h"
#include "exit_code.h"
#include "gpu_bench.h"
#include "moesaic/checkpoint.h"
#include "moesaic/fused_moe.h"
#include "moesaic/spec.h"

namespace moesaic::tool {

// What a caller of the layer stage hands over: rows alone, or beside them what the gate, or the gate
// and the router, would have found.
inline constexpr std::array<const char*, 3> kDoors = {"hidden", "logits", "topk"};

struct BenchSettings {
  MoeLayerSpec spec;
  const Checkpoint* checkpoint = nullptr;  // null: random weights
  FusedMoE::Options options;
  std::string routing = "uniform";
  std::uint64_t seed = 1;
  int engine = 0;  // over ranks: engines have hidden states of their own
  std::string door = kDoors.front();

  // Whose value it was for which the stage, or a point of it, could not be made.
  Origin origin_of(const Status& status) const;
};

// One point: run(i) processes rotation i (0 .. rotations-1); rotations differ in routing and hidden
// states so that a small layer's weights do not stay in a cache that a real model would have
// flushed.
struct BenchPoint {
  int rotations = 1;
  std::function<Status(int rotation)> run;
  TimeFn time;            // on a GPU: how to time all rotations; absent: run them against a clock
  GpuStage::PassFn pass;  // the same over ranks, where their devices wait for each other
  // Bytes that must move per run, averaged over the rotations, and operations; over ranks those of
  // all ranks together.
  double bytes = 0, flops = 0;
  double rel_l2 = 0;  // of the first token against float64 on the same weights
  double bound = 0;   // that rel_l2 must not exceed
};

class BenchStage {
 public:
  virtual ~BenchStage() = default;
  virtual std::string backend() const = 0;
  virtual std::string quant() const = 0;
  virtual std::string backend_note() const { return {}; }  // see slow_backend_note
  virtual Result<BenchPoint> prepare(std::int64_t tokens) = 0;
  // Payload that this rank sent to others so far (the layer stage over ranks), and how: in force.
  virtual std::int64_t bytes_sent() const { return 0; }
  virtual RankTransport transport() const { return RankTransport::kNone; }
};

// What the stage multiplies: says which multiply-add ceiling applies.
Arithmetic stage_arithmetic(const std::string& stage, const BenchSettings& settings);

// The ceilings of the settings' device for what the stage multiplies; `threads` of a CPU.
Result<Ceilings> stage_ceilings(const std::string& stage, const BenchSettings& settings,
                                int threads);

// stage: "gate", "route", "experts", "kernel" (the experts in a ModularKernel) or "layer". Loads or
// draws the weights once.
Result<std::unique_ptr<BenchStage>> make_bench_stage(const std::string& stage,
                                                     const BenchSettings& settings);

}  // namespace moesaic::tool
