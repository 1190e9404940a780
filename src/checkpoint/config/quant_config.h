// quantization_config of a model: which format its linear layers are stored in, and which modules
// are left out. Source: docs/spec/checkpoints.md sections 4 and 4.3. What this version cannot read
// is refused by name, never read as something else.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/config/language_model.h"
#include "checkpoint/config/linear_format.h"
#include "moesaic/status.h"

namespace moesaic::checkpoint {

// How an entry of a skip list (or a target) names modules.
enum class NameRule : std::uint8_t {
  // Its dotted parts appear side by side in the module's name ("mlp.gate" is in
  // "model.layers.3.mlp.gate", but "gate" is not in "...gate_proj"); a part "*" stands for any one
  // part. fp8, mxfp4, GPTQ, AWQ, bitsandbytes.
  kParts,
  // "re:X": a regular expression that matches from the name's start; else the whole name, or the
  // class "Linear". compressed-tensors.
  kExactOrRegex,
  kTextOrRegex,  // "re:X", or a text that is somewhere in the module's name. AutoRound.
  kGlob,         // a shell pattern for the whole name, or a prefix of its dotted parts. ModelOpt.
  kName,         // the whole name, or a prefix of its dotted parts. ModelOpt's targets.
};
constexpr NameRule target_rule(NameRule rule) {
  return rule == NameRule::kGlob ? NameRule::kName : rule;
}

// compressed-tensors: modules of these targets have this format. A plain one that has activations
// is of activations alone. ModelOpt's mixed precision: all modules that are listed with one format.
struct QuantGroup {
  std::string name;  // its key in config_groups, or the algorithm
  LinearFormat format;
  std::vector<std::string> targets;
  std::string unread;  // why the format is none that is read; empty: it is one
  bool operator==(const QuantGroup&) const = default;
};

// An entry of GPTQ's "dynamic", or AutoRound's "extra_config", that gives modules a description of
// their own.
struct QuantOverride {
  std::string key;         // as the file has it
  std::string pattern;     // its regular expression; empty: the key is a text in modules' names
  std::string difference;  // from the rest of the description; empty: none
  std::string_view list = "dynamic";
  bool plain = false;  // it leaves out what it matches
  bool operator==(const QuantOverride&) const = default;
};

// What an entry of AutoRound's extra_config says whose key is no expression.
struct NamedModule {
  std::string difference;  // from the rest of the description; empty: none
  bool plain = false;      // 16 bits or more
  bool operator==(const NamedModule&) const = default;
};

struct QuantPart;
struct QuantConfig {
  LinearFormat linear;  // of every linear that is not left out; plain: nothing is quantised
  NameRule rule = NameRule::kParts;
  std::vector<std::string> skips;
  // Not empty: modules whose names have none of these in them are left out as well. GPTQ.
  std::vector<std::string> only;
  // Not empty: these decide instead of `linear`, which is then that of the first with weights.
  std::vector<QuantGroup> groups;
  std::vector<QuantOverride> overrides;
  // AutoRound's extra_config by key, where that is no expression: the linear of this name has what it
  // says, whatever else speaks of it; where there is none, all linears that have it in their names.
  std::map<std::string, NamedModule, std::less<>> named;
  // Not empty: modules whose names begin with none of these are left out, but those in `named`.
  // AutoRound.
  std::vector<std::string> blocks;
  // Modules that have a description of their own; all the above does not concern them.
  std::vector<QuantPart> parts;
  bool quantized() const { return linear.stored != StoredFormat::kPlain || !groups.empty(); }
  bool operator==(const QuantConfig&) const = default;
};

// What `moesaic convert` writes when one quant_method cannot describe the new experts together with
// linears that keep the format they had:
//   {"routed_experts": {"modules": ["model.layers.3.mlp.experts", ...],
//                       "quantization_config": ...},
//    "other_modules": {"quantization_config": ...}}
// The first holds for these modules and all inside them, the second for every other one. There is
// no quant_method beside them, so that readers that expect one refuse the model: a method that they
// do not know makes some of them load the codes as plain numbers.
struct QuantPart {
  std::vector<std::string> modules;
  QuantConfig quant;
  bool operator==(const QuantPart&) const = default;
};
inline constexpr const char* kExpertsPart = "routed_experts";
inline constexpr const char* kOthersPart = "other_modules";

// Looks at quantization_config, then compression_config, in every holder (holders_of); two that differ
// are kAmbiguousFormat. kUnsupported names the method, kCorruptFile and kInvalidArgument the field.
Result<QuantConfig> parse_quant_config(std::span<const ConfigHolder> holders);
// At the top alone.
Result<QuantConfig> parse_quant_config(const nlohmann::json& top);

// The same from a file beside config.json: hf_quant_config.json (ModelOpt), quantize_config.json
// (GPTQ), quant_config.json (AWQ). `name` begins every message.
Result<QuantConfig> parse_quant_side_file(std::string_view name, std::string_view json);

// Equal but for the order of the lists of names.
bool same_quantisation(QuantConfig a, QuantConfig b);

// The description that holds for this module: of the part that names it or one that contains it, or
// `quant` itself.
const QuantConfig& description_of(const QuantConfig& quant, std::string_view module);

// The group that targets the module: by its name, or the longest that it begins with, else by a
// pattern, else by the class of all linears; null when there is none. Skip lists are not looked at.
const QuantGroup* group_of(const QuantConfig& quant, std::string_view module);

// Whether the module is quantised for being a linear and for nothing else: all are (bitsandbytes), or
// the class is the target that it has.
bool is_quantised_as_linear(const QuantConfig& quant, std::string_view module);

// Whether a skip entry names this module or one that contains it, or `only` names neither, or it is
// outside of `blocks`; for AutoRound's modules that are named, what their entry says.
bool skips_module(const QuantConfig& quant, std::string_view module);

// kUnsupported for a module that an override makes different or whose group's format is not read,
// kAmbiguousFormat for one that an override and a skip entry match: the first in the file counts for
// others, and that is not kept.
Status check_overrides(const QuantConfig& quant, std::string_view module);

// The format of one linear, whatever overrides say: plain when it is left out or no group targets it.
LinearFormat module_format(const QuantConfig& quant, std::string_view module);

// Whether the routed experts `<experts>.<e>.<projection>` are left out; where only some of them
// are, kUnsupported names both groups. `experts` is the module's full name,
// `projections` the last parts of its members' names ("gate_proj" ...).
Result<bool> skips_experts(const QuantConfig& quant, std::string_view experts,
                           std::int64_t num_experts, std::span<const std::string_view> projections);

// The one format of all of them; kUnsupported also when groups give them several. Errors of
// check_overrides. kLimitExceeded: to match every name would take more than kMaxMatchSteps with
// num_layers such layers.
Result<LinearFormat> experts_format(const QuantConfig& quant, std::string_view experts,
                                    std::int64_t num_experts,
                                    std::span<const std::string_view> projections,
                                    std::int64_t num_layers = 1);

// Comparisons of bytes, nearly, of all layers together: seconds, or a minute of regular expressions
// that are made to be slow. Models that list every projection of 61 layers of 384 experts need 1/4.
inline constexpr std::uint64_t kMaxMatchSteps = std::uint64_t{1} << 32;

// kLimitExceeded for more entries than can be matched with the few names of each layer that are not
// experts'.
Status check_match_steps(const QuantConfig& quant, std::int64_t num_layers);

}  // namespace moesaic::checkpoint
