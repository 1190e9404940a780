#include "bench_schemes.h"

#include <array>

namespace moesaic::tool {
namespace {

struct StoredScheme {
  std::string_view name;
  std::string_view nearest;  // named scheme: activations and bound
  DType dtype;
  std::int64_t group = 0;  // 0: the weights of `nearest`
  ZeroPoint zero = ZeroPoint::kNone;
  CodeTable table = CodeTable::kNone;
  bool act_order = false;
};

constexpr std::array<StoredScheme, 11> kStored = {{
    {"fp8-static", "fp8-tensor", DType::kF8E4M3},
    {"int4-g32", "int4-g128", DType::kI4, 32},
    {"int8-g128", "int8-bf16", DType::kI8, 128},
    {"uint4-g128", "int4-g128", DType::kU4, 128, ZeroPoint::kInteger},
    {"uint8-g128", "int8-bf16", DType::kU8, 128, ZeroPoint::kInteger},
    {"int4-g128-act-order", "int4-g128", DType::kI4, 128, ZeroPoint::kNone, CodeTable::kNone, true},
    {"fp4-bf16", "nf4-bf16", DType::kU4, 64, ZeroPoint::kNone, CodeTable::kFp4},
    {"q4_0", "int4-g128", DType::kI4, 32},
    {"q8_0", "int8-bf16", DType::kI8, 32},
    {"q4_k", "int4-g128", DType::kU4, 32, ZeroPoint::kMin},
    {"q6_k", "int8-bf16", DType::kI8, 16},
}};

}  // namespace

Result<QuantScheme> bench_scheme(std::string_view name) {
  for (const StoredScheme& stored : kStored) {
    if (stored.name != name) continue;
    MOESAIC_ASSIGN_OR_RETURN(const Scheme scheme, quant_scheme_from_name(stored.nearest));
    if (stored.group == 0) {  // a static input scale
      OperandQuant fixed = scheme.activation;
      fixed.granularity = ScaleGranularity::kTensor;
      fixed.dynamic = false;
      return make_scheme(stored.name, scheme.weight, fixed, scheme.output_bound);
    }
    OperandQuant w = scheme.weight;
    w.dtype = stored.dtype;
    w.granularity = ScaleGranularity::kGroup;
    w.scale_format = ScaleFormat::kF32;
    w.block_n = 1;
    w.block_k = stored.group;
    w.zero_point = stored.zero;
    w.table = stored.table;
    w.act_order = stored.act_order;
    return make_scheme(stored.name, w, scheme.activation, scheme.output_bound);
  }
  return quant_scheme_from_name(name);
}

std::string stored_scheme_names() {
  std::string names;
  for (const StoredScheme& stored : kStored) {
    if (!names.empty()) names += ' ';
    names += stored.name;
  }
  return names;
}

}  // namespace moesaic::tool
