#include "bench_random.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numbers>
#include <numeric>
#include <string>

#include "core/checked.h"
#include "numerics/codec.h"
#include "numerics/element.h"

namespace moesaic::tool {
namespace {

std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}
double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

// 65536 draws of N(0, 1): elements are picked from it by hashed index, which costs a quarter of a
// hash per element.
const std::vector<float>& normals() {
  static const std::vector<float> table = [] {
    std::vector<float> t(1U << 16);
    for (std::size_t i = 0; i < t.size(); ++i) {
      const double u = 1.0 - unit(mix(2 * i)), v = unit(mix(2 * i + 1));
      t[i] =
          static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
    }
    return t;
  }();
  return table;
}

// Largest of 128*128 normal draws is about 4.2: this maps it to the largest e4m3 value.
constexpr float kFp8Gain = 448.0F / 4.5F;

template <class T>
std::vector<T> encode_table(DType dtype, double sd) {
  std::vector<T> codes(normals().size());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const float x = static_cast<float>(normals()[i] * sd);
    if constexpr (sizeof(T) == 4) {
      codes[i] = x;
    } else if constexpr (sizeof(T) == 2) {
      codes[i] = dtype == DType::kBF16 ? bf16_from_f32(x) : f16_from_f32(x);
    } else {
      codes[i] = e4m3_from_f32(normals()[i] * kFp8Gain);
    }
  }
  return codes;
}

template <class T>
void fill(T* out, std::int64_t n, const std::vector<T>& table, std::uint64_t seed) {
  constexpr std::int64_t kBlock = 1 << 14;
#pragma omp parallel for schedule(static)
  for (std::int64_t b = 0; b < ceil_div(n, kBlock); ++b) {
    std::uint64_t state = mix(seed ^ mix(static_cast<std::uint64_t>(b)));
    const std::int64_t end = std::min(n, (b + 1) * kBlock);
    std::uint64_t bits = 0;
    for (std::int64_t i = b * kBlock; i < end; ++i) {
      if (i % 4 == 0) bits = state = mix(state);
      out[i] = table[bits & 0xFFFFU];
      bits >>= 16;
    }
  }
}

// Any bytes: two 4-bit codes each or an integer, all alike; e2m1 has standard deviation 2.7.
constexpr double kE2M1Sd = 2.7;
void fill_bytes(Tensor& t, std::uint64_t seed) {
  std::vector<std::uint8_t> all(1U << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint8_t>(i);
  fill(t.as<std::uint8_t>(), t.bytes(), all, seed);
}

void fill_normal(Tensor& t, double sd, std::uint64_t seed) {
  const std::int64_t n = t.bytes() * 8 / dtype_bits(t.dtype());
  switch (dtype_bits(t.dtype())) {
    case 32:
      fill(t.as<float>(), n, encode_table<float>(t.dtype(), sd), seed);
      return;
    case 16:
      fill(t.as<std::uint16_t>(), n, encode_table<std::uint16_t>(t.dtype(), sd), seed);
      return;
    default:
      fill(t.as<std::uint8_t>(), n, encode_table<std::uint8_t>(t.dtype(), sd), seed);
      return;
  }
}

// What the codes that are drawn for a format stand for on average.
double code_sd(const OperandQuant& w) {
  if (w.dtype == DType::kF8E4M3) return static_cast<double>(kFp8Gain);
  if (w.table != CodeTable::kNone) return 0.55;
  if (w.dtype == DType::kF4E2M1) return kE2M1Sd;
  if (w.code_bits == 6) return 18.5;
  return dtype_bits(w.dtype) == 8 ? 74 : 4.6;  // all codes alike
}

// A factor of up to 1.4 either way.
double vary(std::uint64_t seed) { return std::exp2(unit(mix(seed)) - 0.5); }

Result<Tensor> varied(const Shape& shape, double value, std::uint64_t seed) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor t, Tensor::uninitialized(DType::kF32, shape));
  for (std::int64_t i = 0; i < t.bytes() / 4; ++i)
    t.as<float>()[i] = static_cast<float>(value * vary(seed + static_cast<std::uint64_t>(i)));
  return t;
}

// Positive numbers of [rows, groups] to the nearest integers times an F16 number per super-block
// (OperandQuant::super_bits).
void round_to_super_blocks(const OperandQuant& w, Tensor& t) {
  const std::int64_t across = t.shape()[1], each = kSuperBlockColumns / w.block_k;
  const float largest = w.super_bits == 6 ? 63.0F : 127.0F;
#pragma omp parallel for schedule(static)
  for (std::int64_t row = 0; row < t.shape()[0]; ++row) {
    for (std::int64_t first = 0; first < across; first += each) {
      float* block = t.as<float>() + row * across + first;
      const std::int64_t count = std::min(each, across - first);
      const float top = *std::max_element(block, block + count);
      const float d = f32_from_f16(f16_from_f32(top / largest));
      for (float* x = block; x < block + count; ++x) *x = std::min(std::round(*x / d), largest) * d;
    }
  }
}

// The finest scales of a [rows, cols] matrix around `value`, each different. E8M0: a factor of two
// either way.
Result<Tensor> random_scales(const OperandQuant& w, std::int64_t rows, std::int64_t cols,
                             double value, std::uint64_t seed) {
  Shape shape{1};
  if (w.granularity == ScaleGranularity::kChannel) shape = {rows};
  if (w.block_k > 0) shape = {ceil_div(rows, w.block_n), ceil_div(cols, w.block_k)};
  if (w.scale_format == ScaleFormat::kF32) {
    MOESAIC_ASSIGN_OR_RETURN(Tensor t, varied(shape, value, seed));
    if (w.super_bits != 0) round_to_super_blocks(w, t);
    if (w.scale_dtype != DType::kF32) {
      for (std::int64_t i = 0; i < t.bytes() / 4; ++i) {
        std::array<std::byte, 4> half{};
        store_from_f32(half.data(), w.scale_dtype, 0, t.as<float>()[i]);
        t.as<float>()[i] = load_as_f32(half.data(), w.scale_dtype, 0);
      }
    }
    return t;
  }
  const bool e8m0 = w.scale_format == ScaleFormat::kE8M0;
  MOESAIC_ASSIGN_OR_RETURN(Tensor t,
                           Tensor::uninitialized(e8m0 ? DType::kF8E8M0 : DType::kF8E4M3, shape));
  const auto middle = static_cast<int>(std::lround(std::log2(value)));
  for (std::int64_t i = 0; i < t.bytes(); ++i) {
    const std::uint64_t s = seed + static_cast<std::uint64_t>(i);
    const auto exponent = static_cast<int>(mix(s) % 3) - 1 + middle;
    t.as<std::uint8_t>()[i] = e8m0 ? static_cast<std::uint8_t>(127 + exponent)
                                   : e4m3_from_f32(static_cast<float>(value * vary(s)));
  }
  return t;
}

// The numbers of a form's groups for those of the weights, each of which is a part of one.
Result<Tensor> of_finer_groups(Tensor t, const OperandQuant& form, const OperandQuant& w,
                               std::int64_t cols) {
  if (form.block_k == w.block_k) return t;
  const std::int64_t times = form.block_k / w.block_k, groups = ceil_div(cols, w.block_k);
  MOESAIC_ASSIGN_OR_RETURN(Tensor fine, Tensor::uninitialized(DType::kF32, {t.shape()[0], groups}));
  for (std::int64_t i = 0; i < fine.bytes() / 4; ++i)
    fine.as<float>()[i] = t.as<float>()[i / groups * t.shape()[1] + i % groups / times];
  return fine;
}

// Random bytes as codes that a form has.
void fit_codes(const OperandQuant& form, Tensor& codes) {
  const int bits = form.code_bits != 0 ? form.code_bits : static_cast<int>(dtype_bits(form.dtype));
  const int least = form.dtype == DType::kU4 ? 0 : -(1 << (bits - 1));
  for (std::int64_t i = 0; i < codes.bytes(); ++i) {
    const int drawn = codes.as<std::uint8_t>()[i] & ((1 << bits) - 1);
    codes.as<std::int8_t>()[i] = static_cast<std::int8_t>(drawn + least);
  }
}

Result<Tensor> random_permutation(std::int64_t n, std::uint64_t seed) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor t, Tensor::uninitialized(DType::kI32, {n}));
  std::int32_t* p = t.as<std::int32_t>();
  std::iota(p, p + n, 0);
  for (std::int64_t i = n - 1; i > 0; --i) {
    const std::uint64_t draw = mix(seed + static_cast<std::uint64_t>(i));
    std::swap(p[i], p[draw % static_cast<std::uint64_t>(i + 1)]);
  }
  return t;
}

class RandomSource final : public ExpertSource {
 public:
  RandomSource(const MoeProblem& problem, std::uint64_t seed) : p_(problem), seed_(seed) {}

  Result<ExpertWeightsView> expert(std::int64_t e) override {
    const std::int64_t rows =
        is_gated(p_.activation.kind) ? 2 * p_.intermediate_size : p_.intermediate_size;
    const std::uint64_t seed = mix(seed_ + static_cast<std::uint64_t>(e));
    const double sd13 = 1.0 / std::sqrt(static_cast<double>(p_.hidden_size));
    const double sd2 = 1.0 / std::sqrt(static_cast<double>(p_.intermediate_size));
    const OperandQuant& w = p_.quant.weight;
    const MatrixForms forms = p_.quant.forms.value_or(MatrixForms{w, w});
    MOESAIC_RETURN_IF_ERROR(make(w13_, forms.w13, rows, p_.hidden_size, sd13, seed));
    MOESAIC_RETURN_IF_ERROR(
        make(w2_, forms.w2, p_.hidden_size, p_.intermediate_size, sd2, seed ^ 1));
    if (p_.has_expert_bias) {
      MOESAIC_ASSIGN_OR_RETURN(w13_.bias, random_tensor(DType::kF32, {rows}, 0.5, seed ^ 2));
      MOESAIC_ASSIGN_OR_RETURN(w2_.bias,
                               random_tensor(DType::kF32, {p_.hidden_size}, 0.5, seed ^ 3));
    }
    ExpertWeightsView v;
    const auto show = [](const Tensor& t, ConstTensorView& to) {
      if (t.present()) to = t.view();
    };
    show(w13_.weight, v.w13), show(w2_.weight, v.w2);
    show(w13_.scale, v.w13_scale), show(w2_.scale, v.w2_scale);
    show(w13_.bias, v.w13_bias), show(w2_.bias, v.w2_bias);
    show(w13_.global_scale, v.w13_global_scale), show(w2_.global_scale, v.w2_global_scale);
    show(w13_.channel_scale, v.w13_channel_scale), show(w2_.channel_scale, v.w2_channel_scale);
    show(w13_.input_scale, v.w13_input_scale), show(w2_.input_scale, v.w2_input_scale);
    show(w13_.zero, v.w13_zero), show(w2_.zero, v.w2_zero);
    show(w13_.min, v.w13_min), show(w2_.min, v.w2_min);
    show(w13_.perm, v.w13_perm), show(w2_.perm, v.w2_perm);
    return v;
  }

 private:
  struct Projection {
    Tensor weight, scale, bias, global_scale, channel_scale, input_scale, zero, min, perm;
  };

  // Weights that have this form.
  Status make(Projection& m, const OperandQuant& form, std::int64_t rows, std::int64_t cols,
              double sd, std::uint64_t seed) {
    const OperandQuant& w = p_.quant.weight;
    if (!m.weight.present()) {
      MOESAIC_ASSIGN_OR_RETURN(m.weight, Tensor::uninitialized(w.dtype, {rows, cols}));
    }
    if (w.granularity == ScaleGranularity::kNone) {
      fill_normal(m.weight, sd, seed);
      return {};
    }
    if (w.dtype == DType::kF8E4M3) {
      fill_normal(m.weight, sd, seed);
    } else {
      fill_bytes(m.weight, seed);
    }
    if (form.code_bits == 6 || form.dtype != w.dtype) fit_codes(form, m.weight);
    // An outer scale takes what an e4m3 scale of about 30 leaves.
    const double scale = sd / code_sd(form);
    const bool outer = w.outer_scale != OuterScale::kNone;
    MOESAIC_ASSIGN_OR_RETURN(Tensor drawn,
                             random_scales(form, rows, cols, outer ? 30.0 : scale, seed));
    const Shape drawn_shape = drawn.shape();
    MOESAIC_ASSIGN_OR_RETURN(m.scale, of_finer_groups(std::move(drawn), form, w, cols));
    if (w.outer_scale == OuterScale::kTensor) {
      MOESAIC_ASSIGN_OR_RETURN(m.global_scale, varied({1}, scale / 30, seed ^ 5));
    }
    if (w.outer_scale == OuterScale::kChannel) {
      MOESAIC_ASSIGN_OR_RETURN(m.channel_scale, varied({rows}, scale / 30, seed ^ 5));
    }
    const OperandQuant& a = p_.quant.activation;
    const bool static_input = !a.dynamic && a.granularity == ScaleGranularity::kTensor;
    if (a.outer_scale == OuterScale::kTensor || static_input) {
      // Room for the largest squares of the intermediate, about 20, over the largest scale times the
      // largest code. Codes of e4m3 do without scales.
      MOESAIC_ASSIGN_OR_RETURN(m.input_scale, Tensor::zeros(DType::kF32, {1}));
      m.input_scale.as<float>()[0] = static_input ? 40.0F / 448.0F : 20.0F / (448.0F * 6.0F);
    }
    MOESAIC_RETURN_IF_ERROR(make_origins(m, form, drawn_shape, cols, scale, seed));
    if (w.act_order) {
      MOESAIC_ASSIGN_OR_RETURN(m.perm, random_permutation(cols, seed ^ 7));
    }
    return {};
  }

  // What unsigned codes are measured from: about the middle of their range.
  Status make_origins(Projection& m, const OperandQuant& form, const Shape& groups,
                      std::int64_t cols, double scale, std::uint64_t seed) const {
    const OperandQuant& w = p_.quant.weight;
    const int middle = w.dtype == DType::kU8 ? 128 : 8;
    if (w.zero_point == ZeroPoint::kInteger) {
      MOESAIC_ASSIGN_OR_RETURN(m.zero, Tensor::uninitialized(DType::kU8, m.scale.shape()));
      for (std::int64_t i = 0; i < m.zero.bytes(); ++i) {
        const std::uint64_t draw = mix(seed + static_cast<std::uint64_t>(i));
        m.zero.as<std::uint8_t>()[i] =
            static_cast<std::uint8_t>(static_cast<std::uint64_t>(middle - 1) + draw % 3);
      }
    }
    if (w.zero_point == ZeroPoint::kMin) {
      const bool none = form.zero_point == ZeroPoint::kNone;
      MOESAIC_ASSIGN_OR_RETURN(Tensor min, varied(groups, none ? 0.0 : scale * middle, seed ^ 6));
      if (form.super_bits != 0 && !none) round_to_super_blocks(form, min);
      MOESAIC_ASSIGN_OR_RETURN(m.min, of_finer_groups(std::move(min), form, w, cols));
    }
    return {};
  }
  MoeProblem p_;
  std::uint64_t seed_;
  Projection w13_, w2_;
};

}  // namespace

std::unique_ptr<ExpertSource> make_random_source(const MoeProblem& problem, std::uint64_t seed) {
  return std::make_unique<RandomSource>(problem, seed);
}

Result<Tensor> random_tensor(DType dtype, const Shape& shape, double sd, std::uint64_t seed) {
  MOESAIC_ASSIGN_OR_RETURN(Tensor t, Tensor::uninitialized(dtype, shape));
  fill_normal(t, sd, mix(seed));
  return t;
}

std::unique_ptr<ExpertSource> make_random_shared_source(const MoeLayerSpec& spec,
                                                        std::uint64_t seed) {
  if (spec.shared.intermediate_size == 0) return nullptr;
  MoeProblem shared;
  shared.num_experts = shared.num_local_experts = shared.top_k = 1;
  shared.hidden_size = spec.hidden_size;
  shared.intermediate_size = spec.shared.intermediate_size;
  shared.activation = spec.shared.activation.value_or(spec.activation);
  shared.quant = spec.quant;
  return make_random_source(shared, seed + 4);
}

Result<MoeLayerTensors> random_layer_tensors(const MoeLayerSpec& spec, std::uint64_t seed,
                                             std::span<const float> routing_bias) {
  MoeLayerTensors t;
  const std::int64_t logits = spec.routing.num_experts + spec.routing.num_zero_experts;
  const double sd = 1.0 / std::sqrt(static_cast<double>(spec.hidden_size));
  // As such models store it.
  const DType of_gate = spec.activation_dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  MOESAIC_ASSIGN_OR_RETURN(t.gate_weight,
                           random_tensor(of_gate, {logits, spec.hidden_size}, sd, seed + 1));
  if (spec.has_router_bias) {
    MOESAIC_ASSIGN_OR_RETURN(t.gate_bias, random_tensor(DType::kF32, {logits}, 0.1, seed + 2));
    for (std::size_t e = 0; e < routing_bias.size(); ++e) {
      t.gate_bias.as<float>()[e] += routing_bias[e];
    }
  }
  if (spec.routing.has_correction_bias) {
    MOESAIC_ASSIGN_OR_RETURN(t.e_score_correction_bias,
                             random_tensor(DType::kF32, {logits}, 0.05, seed + 3));
  }
  // Factors around one.
  const auto factors = [](std::int64_t count, std::uint64_t from) -> Result<Tensor> {
    MOESAIC_ASSIGN_OR_RETURN(Tensor f, random_tensor(DType::kF32, {count}, 0.1, from));
    for (std::int64_t i = 0; i < count; ++i) f.as<float>()[i] += 1.0F;
    return f;
  };
  if (spec.routing.has_expert_scale) {
    MOESAIC_ASSIGN_OR_RETURN(t.expert_scale, factors(spec.num_experts, seed + 6));
  }
  if (spec.input_norm_eps > 0) {
    MOESAIC_ASSIGN_OR_RETURN(t.experts_norm_weight, factors(spec.hidden_size, seed + 7));
  }
  if (spec.shared.gated_output) {
    MOESAIC_ASSIGN_OR_RETURN(t.shared_gate_weight,
                             random_tensor(DType::kBF16, {1, spec.hidden_size}, sd, seed + 5));
  }
  return t;
}

namespace {

struct RoutingKind {
  bool one = false;
  double exponent = 0;  // of the Zipf law; 0: uniform
};

Result<RoutingKind> parse_routing(std::string_view kind) {
  if (kind == "uniform") return RoutingKind{};
  if (kind == "one") return RoutingKind{.one = true};
  const std::string text(kind);
  char* end = nullptr;
  double exponent = 0;
  if (text.rfind("zipf:", 0) == 0) exponent = std::strtod(text.c_str() + 5, &end);
  if (end == nullptr || *end != '\0' || end == text.c_str() + 5 ||
      !(exponent >= 0 && exponent <= 10)) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("--routing: got '{}', need uniform, one or zipf:S with S from 0 to 10", kind));
  }
  return RoutingKind{.one = false, .exponent = exponent};
}

// Experts from the most to the least popular: the same for all routings of a run.
std::vector<std::int32_t> popularity_order(std::int64_t num_experts) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[mix(i) % i]);
  return order;
}

}  // namespace

Status check_routing_name(std::string_view kind) { return parse_routing(kind).status(); }

Result<std::vector<float>> routing_bias(std::string_view kind, std::int64_t num_experts,
                                        std::int64_t num_logits, std::int64_t top_k) {
  MOESAIC_ASSIGN_OR_RETURN(const RoutingKind routing, parse_routing(kind));
  std::vector<float> bias;
  if (!routing.one && routing.exponent == 0) return bias;
  bias.resize(static_cast<std::size_t>(num_logits), 0.0F);
  const std::vector<std::int32_t> order = popularity_order(num_experts);
  for (std::size_t r = 0; r < order.size(); ++r) {
    const auto e = static_cast<std::size_t>(order[r]);
    if (routing.one) {
      bias[e] = static_cast<std::int64_t>(e) < top_k ? 0.0F : -30.0F;
    } else {
      bias[e] = static_cast<float>(-routing.exponent * std::log(static_cast<double>(r + 1)));
    }
  }
  return bias;
}

Result<Routing> random_routing(std::string_view kind, std::int64_t tokens, std::int64_t num_experts,
                               std::int64_t top_k, std::uint64_t seed) {
  MOESAIC_ASSIGN_OR_RETURN(const RoutingKind routing, parse_routing(kind));
  Routing r;
  MOESAIC_ASSIGN_OR_RETURN(r.ids, Tensor::uninitialized(DType::kI32, {tokens, top_k}));
  MOESAIC_ASSIGN_OR_RETURN(r.weights, Tensor::uninitialized(DType::kF32, {tokens, top_k}));
  const std::vector<std::int32_t> order = popularity_order(num_experts);
  std::vector<double> key(order.size());
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int32_t* ids = r.ids.as<std::int32_t>() + t * top_k;
    // Exponential keys: the k smallest of -log(u) / p are a draw without replacement with
    // probabilities p.
    for (std::size_t i = 0; i < key.size(); ++i) {
      const std::uint64_t h = mix(mix(seed + static_cast<std::uint64_t>(t)) + i);
      key[i] = -std::log(1.0 - unit(h)) * std::pow(static_cast<double>(i + 1), routing.exponent);
    }
    std::vector<std::int32_t> by_key(order.size());
    std::iota(by_key.begin(), by_key.end(), 0);
    std::partial_sort(by_key.begin(), by_key.begin() + top_k, by_key.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return key[static_cast<std::size_t>(a)] < key[static_cast<std::size_t>(b)];
                      });
    float sum = 0;
    for (std::int64_t j = 0; j < top_k; ++j) {
      ids[j] = routing.one ? static_cast<std::int32_t>(j)
                           : order[static_cast<std::size_t>(by_key[static_cast<std::size_t>(j)])];
      const double u = unit(mix(mix(seed ^ 77) + static_cast<std::uint64_t>(t * top_k + j)));
      r.weights.as<float>()[t * top_k + j] = static_cast<float>(0.5 + u);
      sum += r.weights.as<float>()[t * top_k + j];
    }
    for (std::int64_t j = 0; j < top_k; ++j) r.weights.as<float>()[t * top_k + j] /= sum;
  }
  return r;
}

}  // namespace moesaic::tool
