// A layer whose tensors arrive one by one (weight_loader.h). Their headers are a container
// (PushedTensors) that is bound as a file is, anew whenever a tensor says something that the plan of
// the layer does not have; the plan in force says what is kept of each tensor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/binding/layer_binding.h"
#include "checkpoint/config/config.h"
#include "checkpoint/container/pushed_tensors.h"
#include "checkpoint/reader/window.h"
#include "moesaic/weight_loader.h"

namespace moesaic {

struct WeightLoader::Impl {
  Impl(checkpoint::ModelConfig config_in, const MoeLayerSpec& spec_in, const Options& options_in);
  // The local slots. kInvalidArgument names field, found and needed.
  Status choose_experts();
  // Settles what the tensors so far tell; what they contradict is finish's to say.
  void resolve();
  // Of names by hand: kInvalidArgument where two tensors of the plan have one, since the first would
  // be read as the second too.
  Status check_names_differ() const;

  bool looks_at(std::string_view name) const;
  Result<bool> load(std::string_view name, ConstTensorView tensor, quant::GgufType type);
  Result<std::vector<std::string>> missing() const;
  Result<MoeLayerWeights> finish();

  checkpoint::ModelConfig config;
  std::shared_ptr<const void> owner;  // of the family, where it is no known one
  MoeLayerSpec spec;
  Options options;
  std::vector<std::int64_t> ids;       // the logical expert in each local slot
  std::vector<std::int64_t> distinct;  // the same without copies, ascending
  std::shared_ptr<checkpoint::PushedTensors> tensors;
  bool finished = false;

 private:
  using PlannedTensor = checkpoint::PlannedTensor;
  using TensorInfo = checkpoint::TensorInfo;

  std::string checkpoint_name(std::string_view pushed) const;
  // Can the name be one of this layer's, whatever else is settled?
  bool in_layer(std::string_view name) const;
  // Of a name that no plan has had: may a later one have it, or must it be refused by name?
  bool may_be_wanted(std::string_view name) const;
  const PlannedTensor* planned(std::string_view name) const;
  // The plan's entry for a tensor whose header is in the set; looks again where there is none or it
  // does not fit.
  const PlannedTensor* plan_for(const TensorInfo& info);
  bool is_needed(const checkpoint::LayerSource& source, const PlannedTensor& tensor) const;
  bool is_used(const PlannedTensor& tensor) const;
  checkpoint::TensorNeeded needed() const;
  // May other tensors show that the plan was wrong about the form of this one?
  bool may_fit_later(const PlannedTensor& tensor) const;
  // Decides about a tensor whose header is in the set; true when bytes of it were kept.
  Result<bool> take(const TensorInfo& info, const ConstTensorView& tensor);
  Status keep(const TensorInfo& info, std::span<const checkpoint::ByteRuns> runs,
              const ConstTensorView& tensor);
  // What waited for the plan, after it changed.
  void settle_waiting();
  // Of a tensor in the plan, what is kept.
  std::vector<checkpoint::ByteRuns> runs(const PlannedTensor& tensor, const TensorInfo& info) const;

  std::vector<std::string> layer_names_;  // what this layer's names may begin with
  // What the tensors so far tell.
  struct Known {
    std::optional<checkpoint::LayerSource> source;
    checkpoint::MlpSlice slice;
    bool settled = false;  // the slice is how the experts are read
    std::unordered_map<std::string, PlannedTensor> plan;
  };
  Known known_;
  std::optional<Known> before_;  // the tensor that is being loaded, where it told something
  // Names that no plan has had, or not in this form: kept whole until one has, or finish refuses them.
  std::set<std::string> waiting_;
  std::int64_t failures_ = 0;  // looks at the names that told nothing new
};

}  // namespace moesaic
