// The scheme that is computed, chosen from the scheme the weights are stored in and the requested
// name, and what must happen to the weights while they are loaded. Pure.
#pragma once

#include <string>
#include <string_view>

#include "moesaic/dtype.h"
#include "moesaic/quant.h"
#include "moesaic/status.h"

namespace moesaic::layer {

enum class LoadConversion : std::uint8_t {
  kNone,      // weights are used as they are stored
  kRound,     // F32, BF16 or F16 rounded once to scheme.weight.dtype
  kQuantize,  // F32, BF16 or F16 quantised to scheme.weight
};

struct QuantPlan {
  Scheme scheme;                          // in force; output_bound covers the conversion
  DType activation_dtype = DType::kBF16;  // of MoeProblem
  LoadConversion conversion = LoadConversion::kNone;
};

//   stored            scheme of the weights in the checkpoint
//   activation_dtype  of the model; what fp8-block rounds intermediates to
//   requested         --quant name, or "as-is"
// Plain weights become any scheme. Quantised ones run as they are stored, in fp32, or with the
// activations of another scheme of the same weights; they are not quantised a second time.
// kUnsupported (what is stored, what was asked, the legal names and the nearest), or the error of
// quant_scheme_from_name.
Result<QuantPlan> plan_quant(const Scheme& stored, DType activation_dtype,
                             std::string_view requested);

// The same for a shared expert, given how the routed experts are stored: a model that leaves its
// shared expert unquantised beside quantised routed ones wants it so, and a request for an fp8
// scheme does not change that. One that is quantised in another format than the routed experts takes
// the requested scheme where its weights can, else it stays as it is stored.
Result<QuantPlan> plan_shared_quant(const Scheme& shared_stored, const Scheme& routed_stored,
                                    DType activation_dtype, std::string_view requested);

}  // namespace moesaic::layer
