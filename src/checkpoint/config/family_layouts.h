// How the known families store their experts, as constants for the table of families.
#pragma once

#include <string_view>

#include "checkpoint/config/families.h"

namespace moesaic::checkpoint {

// make_activation("swigluoai"), for tables that are constants.
inline constexpr ActivationSpec kGptOssActivation = {ActivationKind::kSwigluOai, 7.0F, 1.702F, 1.0F,
                                                     0.0F};

constexpr ExpertLayout per_expert(std::string_view block, std::string_view gate,
                                  std::string_view up, std::string_view down) {
  ExpertLayout layout;
  layout.storage = ExpertStorage::kPerExpert;
  layout.block = block;
  layout.gate = gate;
  layout.up = up;
  layout.down = down;
  layout.weight_suffixes = {".weight"};
  layout.scale_suffix = ".weight_scale_inv";
  return layout;
}

constexpr ExpertLayout projections(std::string_view block) {
  return per_expert(block, "experts.{e}.gate_proj", "experts.{e}.up_proj", "experts.{e}.down_proj");
}

constexpr ExpertLayout w123(std::string_view block) {
  return per_expert(block, "experts.{e}.w1", "experts.{e}.w3", "experts.{e}.w2");
}

// As quantisers of transformers' modules name single experts in families whose own files do not.
constexpr ExpertLayout split_by_quantisers(std::string_view block) {
  ExpertLayout layout = projections(block);
  layout.of_quantisers = true;
  return layout;
}

// The stacked form that recent exports keep: the same modules as in memory, not split again.
constexpr ExpertLayout fused(ExpertStorage storage, std::string_view block) {
  ExpertLayout layout;
  layout.storage = storage;
  layout.block = block;
  layout.gate = "experts.gate_up_proj";
  layout.down = "experts.down_proj";
  layout.weight_suffixes = {"", ".weight"};
  layout.scale_suffix = "_scale_inv";
  return layout;
}

constexpr ExpertLayout fused_nt(std::string_view block) {
  return fused(ExpertStorage::kFusedNT, block);
}

constexpr ExpertLayout up_first(std::string_view block, std::string_view gate_and_up,
                                std::string_view down) {
  ExpertLayout layout = per_expert(block, gate_and_up, "", down);
  layout.storage = ExpertStorage::kPerExpertUpFirst;
  return layout;
}

// One MLP beside the routed experts: `<module>.gate_proj` and so on.
constexpr ExpertLayout shared_mlp(std::string_view gate, std::string_view up,
                                  std::string_view down) {
  return per_expert("", gate, up, down);
}

constexpr ExpertLayout kSharedExperts =
    shared_mlp("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj");
constexpr ExpertLayout kSharedExpert =
    shared_mlp("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj");

constexpr ExpertLayout granite_layout(std::string_view block, std::string_view gate_up,
                                      std::string_view down) {
  ExpertLayout layout = fused_nt(block);
  layout.gate = gate_up;
  layout.down = down;
  layout.weight_suffixes = {".weight"};
  return layout;
}

constexpr ExpertLayout gpt_oss_layout() {
  ExpertLayout layout = fused(ExpertStorage::kFusedNNInterleaved, "mlp");
  layout.weight_suffixes = {""};
  layout.bias_suffix = "_bias";
  return layout;
}

constexpr ExpertLayout gpt_oss_split_layout() {
  ExpertLayout layout = split_by_quantisers("mlp");
  layout.bias_suffix = ".bias";
  return layout;
}

constexpr ExpertLayout gpt_oss_mxfp4_layout() {
  ExpertLayout layout = gpt_oss_layout();
  layout.storage = ExpertStorage::kMxfp4Interleaved;
  layout.weight_suffixes = {"_blocks"};
  layout.scale_suffix = "_scales";
  return layout;
}

}  // namespace moesaic::checkpoint
