// Experts with random weights of any format.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "bench_draws.h"
#include "bench_random.h"
#include "core/checked.h"
#include "numerics/codec.h"
#include "numerics/element.h"

namespace moesaic::tool {
namespace {

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
#pragma omp parallel for schedule(static) if (t.bytes() > (1 << 16))
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
// parts: of equal rows, in each of which blocks begin anew (gate and up).
Result<Tensor> random_scales(const OperandQuant& w, std::int64_t parts, std::int64_t rows,
                             std::int64_t cols, double value, std::uint64_t seed) {
  Shape shape{1};
  if (w.granularity == ScaleGranularity::kChannel) shape = {rows};
  if (w.block_k > 0) shape = {parts * ceil_div(rows / parts, w.block_n), ceil_div(cols, w.block_k)};
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
    const bool gated = is_gated(p_.activation.kind);
    const std::int64_t rows = gated ? 2 * p_.intermediate_size : p_.intermediate_size;
    const std::uint64_t seed = mix(seed_ + static_cast<std::uint64_t>(e));
    const double sd13 = 1.0 / std::sqrt(static_cast<double>(p_.hidden_size));
    const double sd2 = 1.0 / std::sqrt(static_cast<double>(p_.intermediate_size));
    const OperandQuant& w = p_.quant.weight;
    const MatrixForms forms = p_.quant.forms.value_or(MatrixForms{w, w});
    MOESAIC_RETURN_IF_ERROR(make(w13_, forms.w13, gated ? 2 : 1, rows, p_.hidden_size, sd13, seed));
    MOESAIC_RETURN_IF_ERROR(
        make(w2_, forms.w2, 1, p_.hidden_size, p_.intermediate_size, sd2, seed ^ 1));
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
  Status make(Projection& m, const OperandQuant& form, std::int64_t parts, std::int64_t rows,
              std::int64_t cols, double sd, std::uint64_t seed) {
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
                             random_scales(form, parts, rows, cols, outer ? 30.0 : scale, seed));
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

}  // namespace moesaic::tool
