// What distinguishes the model families, as data: names of configuration fields and tensors, which
// layers are MoE, how experts are stored, how tokens are routed. Adding a family is adding a table
// row. Source: docs/spec/checkpoints.md section 3.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/activation.h"
#include "moesaic/expert_storage.h"
#include "moesaic/spec.h"

namespace moesaic::checkpoint {

// Up to N names. A literal type, so that the tables are constants; an empty string is a name too.
template <std::size_t N>
struct NameList {
  constexpr NameList() = default;
  constexpr NameList(std::initializer_list<std::string_view> list_in) {
    for (const std::string_view name : list_in) names[count++] = name;
  }
  constexpr std::span<const std::string_view> list() const { return {names.data(), count}; }

  std::array<std::string_view, N> names{};
  std::size_t count = 0;
};

// Which layers i of L are MoE layers.
enum class LayerRule : std::uint8_t {
  kEvery,
  kSparseStep,  // i not in mlp_only_layers (default: the family's first ones) and
                // (i + 1) % decoder_sparse_step == 0
  kFirstDense,  // i >= first_k_dense_replace and i % moe_layer_freq == 0, or moe_layer_freq[i] is 1
  kPeriod,      // i % expert_layer_period == expert_layer_offset
  kInterleave,  // i in moe_layers, or (i + 1) % interleave_moe_layer_step == 0
  kInterval,    // (i + 1) % moe_layer_interval == 0, between moe_layer_start_index and _end_index
  kEnumerated,  // i in moe_layers_enum ("4,5,6" or a list), or i >= default_first_dense
  kListed,      // moe_layer_freq[i] is 1, or i >= the family's default_first_dense
  kPattern,     // hybrid_override_pattern[i] is 'E', or layers_block_type[i] is "moe"
};

constexpr bool is_per_expert(ExpertStorage storage) {  // tensors of its own for every expert
  return storage == ExpertStorage::kPerExpert || storage == ExpertStorage::kPerExpertUpFirst;
}
constexpr bool is_interleaved(ExpertStorage storage) {  // gate and up take turns
  return storage == ExpertStorage::kFusedNNInterleaved ||
         storage == ExpertStorage::kFusedNTInterleaved ||
         storage == ExpertStorage::kMxfp4Interleaved;
}
constexpr bool is_fused(ExpertStorage storage) {  // gate and up in one tensor
  return storage == ExpertStorage::kPerExpertUpFirst || storage == ExpertStorage::kFusedNT ||
         storage == ExpertStorage::kFusedNN || is_interleaved(storage);
}
constexpr bool is_columnwise(
    ExpertStorage storage) {  // rows of the file are columns of the weights
  return storage == ExpertStorage::kFusedNN || storage == ExpertStorage::kFusedNNInterleaved;
}
// One way a family's experts are found on disk. The family decides which exist; shapes only where
// it has two with the same names (layer_binding.cc, choose_orientation). Names are relative to the
// block.
struct ExpertLayout {
  ExpertStorage storage = ExpertStorage::kPerExpert;
  std::string_view block;  // module of the MoE block in its layer: "mlp"; empty: the layer itself
  // Modules, "{e}" is the expert. Fused: `gate` is gate_up, `up` is empty. Not gated: `gate` is
  // empty.
  std::string_view gate, up, down;
  NameList<2> weight_suffixes;        // of a weight; two when both spellings exist
  std::string_view scale_suffix;      // of an FP8-block scale
  std::string_view bias_suffix = "";  // of an expert bias; empty: the family has none
  // Written by quantisers, which split what transformers holds in one tensor, and by no one else:
  // convert does not write it.
  bool of_quantisers = false;
  constexpr bool present() const { return !down.empty(); }
};

// Where `renormalize` comes from.
enum class RenormRule : std::uint8_t {
  kNever,
  kAlways,
  kIfSeveral,         // top_k > 1
  kOfSeveral,         // always, but implementations disagree about a single one: top_k 1 is refused
  kStated,            // the boolean field `renorm_field`
  kStatedForSigmoid,  // the same with sigmoid scores; softmax is over the selected
};
// Whether there is an e_score_correction_bias.
enum class BiasRule : std::uint8_t {
  kNone,
  kAlways,
  kTopkMethod,  // iff topk_method is "noaux_tc"
  kStated,      // the boolean field `bias_field`; when absent, or without such a field: iff the
                // checkpoint holds the tensor
};
// Where routed_scaling_factor applies.
enum class ScaleRule : std::uint8_t {
  kNone,      // the family has no such field
  kAlways,    // after the renormalisation
  kOnOutput,  // on the sum of the routed experts
};

// A field of a family's configuration that is not read, because this version computes what one
// value of it says, or because nothing in the block depends on it. Any other value is refused by
// name; so is every field in neither list whose name refers to experts or routing (unread_fields).
struct AssumedField {
  std::string_view name;
  std::string_view value = {};  // JSON, alternatives between '|'; empty: any, it changes nothing
  // Not empty: implementations disagree about other values, and this is how.
  std::string_view readings = {};
};

// A family's own assumed fields; a literal type like NameList.
struct AssumedFields {
  constexpr AssumedFields() = default;
  constexpr AssumedFields(std::initializer_list<AssumedField> list_in) { add(list_in); }
  // Behind those of the family that this one was made from; an entry of the same name replaces it.
  constexpr void add(std::initializer_list<AssumedField> list_in) {
    for (const AssumedField& field : list_in) {
      std::size_t at = 0;
      while (at < count && fields[at].name != field.name) ++at;
      fields[at] = field;
      if (at == count) ++count;
    }
  }
  constexpr std::span<const AssumedField> list() const { return {fields.data(), count}; }

  std::array<AssumedField, 16> fields{};
  std::size_t count = 0;
};

struct RoutingRule {
  RoutingMethod method = RoutingMethod::kTopK;  // kTopK becomes kGroupedTopK with n_group > 1
  ScoringFunc scoring_func = ScoringFunc::kSoftmax;
  std::string_view scoring_field;  // empty: the function is fixed
  bool may_be_softmax = true;      // the field may say so
  RenormRule renorm = RenormRule::kNever;
  std::string_view renorm_field = "norm_topk_prob";
  std::string_view renorm_alias;  // another name of the same; empty: none
  bool default_renorm = false;
  double renorm_floor = 0.0;  // the default of moe_norm_min
  double renorm_epsilon = 0.0;
  BiasRule bias = BiasRule::kNone;
  std::string_view bias_field = "use_routing_bias";
  std::string_view default_topk_method;  // empty: the field is not read
  bool reads_groups = false;             // group_fields, topk_group
  NameList<2> group_fields = {"n_group"};
  bool group_by_best_two = false;  // as in RoutingSpec
  std::int64_t default_n_group = 1;
  std::int64_t default_topk_group = 1;
  ScaleRule scale = ScaleRule::kNone;
  std::string_view scale_field = "routed_scaling_factor";
  double default_scale = 1.0;
  // Not empty: implementations disagree about a file without the scale, and this is how.
  std::string_view scale_unsaid;
  bool weight_on_input = false;  // the routing weight multiplies the expert's input
};

// Where the shared expert's width comes from.
enum class SharedRule : std::uint8_t {
  kNone,
  kOwnWidth,  // shared_width_field, times shared_count_field where the family has one
  kCount,     // shared_count_field * the routed width, stored as one MLP
};

// Router and routed experts that see RMS-normalised rows; the names are relative to the layer.
struct InputNorm {
  std::string_view eps_field;  // empty: none
  double default_eps = 0.0;
  std::string_view router_scale;    // [H]; times 1 / sqrt(H), on what the router sees
  std::string_view experts_weight;  // [H], on what the experts see
  std::string_view expert_scale;    // [E], on the routing weights
  constexpr bool present() const { return !eps_field.empty(); }
};

struct Family {
  std::string_view title;  // for people: "DeepSeek-V3"
  NameList<4> model_types;
  NameList<3> width_fields;      // names of I, the first that is there
  std::string_view width_alias;  // another name of the first; empty: none
  LayerRule layer_rule = LayerRule::kEvery;
  std::int64_t default_first_dense = 0;  // kSparseStep, kFirstDense, kEnumerated, kListed
  NameList<2> first_dense_fields = {"first_k_dense_replace"};
  std::string_view first_dense_unsaid;  // as RoutingRule::scale_unsaid
  bool has_layer_types = false;         // mlp_layer_types: "sparse" or "dense" for each layer
  bool has_frequency_list = false;      // moe_layer_freq may be a list of 0 and 1 (kFirstDense)
  std::string_view moe_flags_field;     // a list of booleans, one per layer; empty: no such field
  RoutingRule routing;
  SharedRule shared = SharedRule::kNone;
  std::string_view shared_width_field = "shared_expert_intermediate_size";
  std::string_view shared_width_alias;    // another name of the same; empty: none
  std::int64_t default_shared_width = 0;  // 0: the field must be there
  // kCount: where the field is there it must repeat the routed width, of one shared expert;
  // implementations disagree about any other value.
  std::string_view shared_repeated_width;
  std::string_view shared_count_field;
  std::string_view shared_count_alias;  // another name of the same; empty: none
  std::int64_t default_shared_count = 0;
  // Not empty: implementations disagree about a file without the count, and this is how.
  std::string_view shared_unsaid;
  // "sum"; another value, or none, is another way to add shared experts and refused; empty: no such
  // field.
  std::string_view shared_sum_field;
  // Where a family's fields have names of their own.
  std::string_view hidden_field = "hidden_size";
  std::string_view num_layers_field = "num_hidden_layers";
  std::string_view moe_object;    // object that holds the experts' fields: "ffn_config"
  bool has_layer_lists = false;   // numbers may be lists with an entry per layer
  std::string_view switch_field;  // a boolean; false or absent: the model is dense
  // Activation: hidden_act (default silu), or a fixed kind with these constants.
  bool reads_hidden_act = true;
  std::string_view activation_field = "hidden_act";
  ActivationSpec activation;
  // kSwigluStep with a limit per layer, where the lists have one: null and 0 leave plain SiLU.
  std::string_view step_limits, shared_step_limits;
  bool shared_unlimited = false;  // the limit of the activation is the routed experts' alone
  // Constants of the activation; empty: the family has no such field.
  std::string_view limit_field;
  std::string_view alpha_field;
  std::string_view beta_field, up_limit_field;  // of kSitu

  AssumedFields assumed;

  std::string_view layer_prefix = "model.layers.";  // what precedes "<i>.<block>" in plain models
  // Tensors, relative to the block; empty: the family has no such tensor.
  std::string_view gate_weight = "gate.weight";
  std::string_view gate_weight_alternative;  // what some files have instead
  bool router_beside_block = false;          // its names are relative to the layer
  std::string_view gate_bias;
  NameList<2> correction_bias;  // spellings
  // Layers that route by a table of token ids: those that mlp_layer_types calls "hash_moe", or the
  // first num_hash_layers (default: this many).
  std::int64_t default_hash_layers = 0;
  std::string_view hash_table;
  ExpertLayout shared_layout;        // of the shared expert; `block` is not used
  ExpertLayout shared_alternative;   // what some files have instead
  bool shared_beside_block = false;  // its names are relative to the layer
  std::string_view shared_gate;
  InputNorm input_norm;
  std::array<ExpertLayout, 5> layouts;
};

std::span<const Family> families();
// nullptr for an unknown model_type.
const Family* find_family(std::string_view model_type);
// All model_types of all families, for "nearest known" hints.
std::vector<std::string_view> known_model_types();

// Modules whose tensors belong to the block although they lie beside it in the layer: the router, the
// shared expert under each of its names.
std::vector<std::string_view> modules_beside_block(const Family& family);

// What precedes "<i>.<block>" in tensor names: plain models and the known multimodal wrappers.
std::span<const std::string_view> layer_prefixes();

// Fields that mean the same in every family.
std::span<const std::string_view> expert_count_fields();
std::span<const std::string_view> top_k_fields();
// Fields that decide which layers are MoE by this rule: mlp_layer_types may leave them unread.
std::span<const std::string_view> layer_rule_fields(LayerRule rule);

// Name of a block: "model.layers.", 3, "mlp" -> "model.layers.3.mlp"; without a block "blk.3",
// without a prefix the block alone.
std::string block_name(std::string_view layer_prefix, std::int64_t layer, std::string_view block);

// "experts.{e}.w1" with e = 3 -> "experts.3.w1".
std::string expand_expert(std::string_view pattern, std::int64_t expert);
// Whether `name` is the pattern with some number in place of "{e}" (without "{e}": the pattern
// itself).
bool matches_pattern(std::string_view pattern, std::string_view name);

}  // namespace moesaic::checkpoint
