// How one kind of device computes a layer. FusedMoE keeps what is the same on all of them: the
// plan, the checks of a call, chunks and the lock. A new kind of device is one more row.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "layer/fused_plan.h"
#include "moesaic/checkpoint.h"
#include "moesaic/device.h"
#include "moesaic/fused_moe.h"
#include "moesaic/status.h"

namespace moesaic::layer {

class ExpertBalancer;  // expert_balancer.h
class RankMesh;        // rank_mesh.h

// What an engine is made from. `mesh` must outlive the engine, the others only create().
struct EngineParts {
  const MoeLayerSpec& spec;
  const FusedPlan& plan;
  const FusedMoE::Options& options;
  MoeLayerWeights& weights;
  const RankMesh* mesh = nullptr;  // of an active rank plan; else null
};

class LayerEngine {
 public:
  virtual ~LayerEngine() = default;
  LayerEngine() = default;
  LayerEngine(const LayerEngine&) = delete;
  LayerEngine& operator=(const LayerEngine&) = delete;

  // At most max_tokens rows of host tensors, matrices, which the caller has checked; returns when
  // the output is written. One call at a time. Over ranks collective, and a failure of this rank is
  // told to all.
  virtual Status forward_host(const FusedMoE::Args& args) const = 0;
  // Two of them, under way at once where the plan says so (RankPlan::in_flight).
  virtual Status forward_pair(const FusedMoE::Args& first, const FusedMoE::Args& second) const;
  // As FusedMoE::enqueue, with its checks. kUnsupported where there are no streams.
  virtual Status enqueue(Stream stream, const FusedMoE::Args& args) const = 0;

  // As FusedMoE::maybe_all_reduce for memory of a GPU, where a sum is left. kUnsupported where there
  // is none.
  virtual Status sum_over_replicas(Stream stream, const TensorView& x) const;

  // Of calls that nobody waits for: ok, or why one ended.
  virtual Status health() const { return {}; }
  // How rows travel between ranks, where Options leaves a choice; else empty.
  virtual std::string rank_engine() const { return {}; }

  virtual std::string_view experts_backend() const = 0;
  virtual std::int64_t weight_bytes() const = 0;
  virtual std::int64_t workspace_bytes() const = 0;
  virtual std::string determinism() const = 0;

  // Expert load balancing (Options::enable_eplb): null where no experts move.
  virtual ExpertBalancer* balancer() const { return nullptr; }
  // The routed experts' rows, as Experts has them.
  virtual Result<std::vector<ExpertPart>> expert_parts() const = 0;
  // An engine with this one's gate, router and shared experts, which both then share, for another
  // world: its plan, options and mesh (null or outliving the engine), and a source of its routed
  // experts. This one stays as it is. kUnsupported where an engine is made anew.
  virtual Result<std::unique_ptr<LayerEngine>> in_world(const FusedPlan& plan,
                                                        const FusedMoE::Options& options,
                                                        const RankMesh* mesh,
                                                        ExpertSource& source) const;
};

// The stages that explain lists by engine, in its order; experts have a catalogue of their own.
enum class ExplainStage : std::uint8_t { kGate, kRouter, kPrepareFinalize };

// A row of the catalogue of engines.
struct LayerEngineRow {
  std::string_view name;
  bool (*serves)(Device device);
  // The reduction in slot order gives the experts every slot as a row of its own (rank_plan.h).
  bool slots_as_rows = false;
  // Appends this engine's candidates of one stage for a layer on `device`. Where that is another
  // engine's device, each candidate is refused for it, unless it has a reason of its own.
  void (*append_candidates)(ExplainStage stage, const FusedPlan& plan, std::string_view router_name,
                            Device device, std::vector<CandidateReport>& rows);
  // Fills backend, workspace, determinism and threads for a layer on this engine, without weights
  // or a device; the refusal of create() where the plan alone leads to one.
  Status (*explain)(const FusedPlan& plan, const MoeLayerSpec& spec,
                    const FusedMoE::Options& options, LayerExplanation& explanation);
  // check_device() has accepted the device. Errors of every stage, with its name in front.
  Result<std::unique_ptr<LayerEngine>> (*create)(const EngineParts& parts);
};
// Every device is served by one row. Engines of GPUs first.
std::span<const LayerEngineRow> layer_engines();
const LayerEngineRow& engine_of(Device device);

// determinism() of a layer whose experts (and, unless empty, shared experts) are these.
std::string layer_determinism(std::string_view routed, std::string_view routed_determinism,
                              std::string_view shared, std::string_view shared_determinism);
// A refusal of a candidate of another kind of device: `own` when that is one, else the device.
Status on_other_device(const Status& own, Device device, std::string_view need);

}  // namespace moesaic::layer
