#include <map>

#include "checkpoint/config/gguf_config.h"

namespace moesaic::checkpoint {
namespace {

// GGUF names are the same for every family, and so is the storage: [E, I, H], [E, I, H], [E, H, I],
// [E, 2I, H] of gate and up together, or an expert's matrices by themselves.
// How tokens are routed, which biases exist and what the activation is stays the family's.
Family as_gguf(const Family& base) {
  Family f = base;
  f.layer_prefix = kGgufLayerPrefix;
  f.gate_weight = "ffn_gate_inp.weight";
  if (!base.gate_bias.empty()) f.gate_bias = "ffn_gate_inp.bias";
  if (base.correction_bias.count > 0) f.correction_bias = {"exp_probs_b.bias", "exp_probs_b"};
  if (!base.shared_gate.empty()) f.shared_gate = "ffn_gate_inp_shexp.weight";
  f.shared_beside_block = f.router_beside_block = false;
  if (!base.hash_table.empty()) f.hash_table = "ffn_gate_tid2eid.weight";
  if (base.input_norm.present()) {
    f.input_norm.router_scale = "ffn_gate_inp.scale";
    f.input_norm.experts_weight = "pre_ffw_norm_2.weight";
    f.input_norm.expert_scale = "ffn_down_exps.scale";
  }
  const bool gated = is_gated(base.activation.kind);
  const auto layout = [gated](std::string_view gate, std::string_view up, std::string_view down) {
    ExpertLayout names;
    if (gated) names.gate = gate;
    names.up = up;
    names.down = down;
    names.weight_suffixes = {".weight"};
    return names;
  };
  if (base.shared != SharedRule::kNone) {
    f.shared_layout = layout("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp");
    f.shared_alternative = {};
    // Granite with sliding windows: gate above up under the name of up.
    if (base.shared_layout.storage == ExpertStorage::kFusedNT) {
      f.shared_alternative = layout("ffn_up_shexp", "", "ffn_down_shexp");
      f.shared_alternative.storage = ExpertStorage::kFusedNT;
    }
  }
  ExpertLayout experts = layout("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps");
  experts.storage = ExpertStorage::kStacked;
  if (!base.layouts[0].bias_suffix.empty()) experts.bias_suffix = ".bias";
  f.layouts = {experts};
  if (gated) {  // gate above up in one tensor
    experts.storage = ExpertStorage::kFusedNT;
    experts.gate = "ffn_gate_up_exps";
    experts.up = "";
    f.layouts[1] = experts;
  }
  if (experts.bias_suffix.empty()) {  // the first files with experts, of families without biases
    f.layouts[2] = layout("ffn_gate.{e}", "ffn_up.{e}", "ffn_down.{e}");
  }
  return f;
}

}  // namespace

const Family* gguf_family(std::string_view model_type) {
  // Made once; the table of families is constant, so that addresses stay valid.
  static const std::map<const Family*, Family> kFamilies = [] {
    std::map<const Family*, Family> made;
    for (const Family& family : families()) made.emplace(&family, as_gguf(family));
    return made;
  }();
  const auto it = kFamilies.find(find_family(model_type));
  return it == kFamilies.end() ? nullptr : &it->second;
}

}  // namespace moesaic::checkpoint
