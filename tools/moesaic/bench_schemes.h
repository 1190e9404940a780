// The schemes that `bench` takes on random weights: those with a name of their own, and what
// checkpoints store besides.
#pragma once

#include <string>
#include <string_view>

#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic::tool {

// A named scheme (quant_scheme_from_name), or one of:
//   fp8-static                         fp8-tensor with one input scale for all rows
//   int4-g32, int8-g128                integers with a scale per row and 32 or 128 columns
//   uint4-g128, uint8-g128             the same with zero points (GPTQ, AWQ)
//   int4-g128-act-order                columns in an order of their own (GPTQ desc_act)
//   fp4-bf16                           bitsandbytes fp4, a scale per 64
//   q4_0, q8_0, q4_k, q6_k             GGUF blocks as the loader leaves them
// Activations of all but fp8-static are bf16. kNotFound otherwise.
Result<QuantScheme> bench_scheme(std::string_view name);

// The names that quant_scheme_from_name does not know, separated by blanks.
std::string stored_scheme_names();

}  // namespace moesaic::tool
