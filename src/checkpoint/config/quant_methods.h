// The parsers of the quantisation methods, one per quant_method. `fields` is the object that
// describes the quantisation. Errors as parse_quant_config has them.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "checkpoint/config/config_fields.h"
#include "checkpoint/config/quant_config.h"

namespace moesaic::checkpoint {

// One entry per expert and projection of every layer is what careless exporters write.
inline constexpr std::size_t kMaxSkipEntries = 1 << 18;

Result<QuantConfig> parse_compressed_tensors(const ConfigFields& fields);  // quant_compressed.cc
Result<QuantConfig> parse_gptq(const ConfigFields& fields);
Result<QuantConfig> parse_awq(const ConfigFields& fields);
Result<QuantConfig> parse_auto_round(const ConfigFields& fields);  // quant_auto_round.cc
// AutoRound's extra_config beside another method: its words are that method's, and an entry that gives
// experts others is refused when they are asked for.
Status check_extra_config(const ConfigFields& fields, QuantConfig* quant);
Result<QuantConfig> parse_bitsandbytes(const ConfigFields& fields);
Result<QuantConfig> parse_modelopt(const ConfigFields& fields);  // quant_modelopt.cc

// With the letters of ASCII in lower case.
std::string lower_case(std::string text);

// kLimitExceeded for an object with more than kMaxSkipEntries members.
Status check_entry_count(const ConfigFields& fields, std::string_view object, std::size_t entries);

// Appends a list of names; kInvalidArgument for an empty one, kUnsupported for "re:..." unless
// allowed.
Status append_skips(const ConfigFields& fields, std::string_view list, bool regex_allowed,
                    QuantConfig* quant);

}  // namespace moesaic::checkpoint
