#include "gate/sm90/gate_linear.h"

#include <fmt/format.h>

#include <limits>
#include <new>
#include <vector>

#include "core/fault.h"
#include "core/refusal.h"
#include "gate/sm90/bf16_parts.h"
#include "gate/sm90/gate.h"
#include "gate/sm90/round_logits.h"
#include "numerics/element.h"
#include "numerics/float_codec.h"

namespace moesaic::cuda {
namespace {

Result<std::vector<float>> widened(const ConstTensorView& t, std::int64_t count) {
  try {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
      values[static_cast<std::size_t>(i)] = load_as_f32(t.data, t.dtype, i);
    }
    return values;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("gate: cannot allocate {} numbers on the host", count));
  }
}

Status upload_as_f32(std::string_view what, const ConstTensorView& t, std::int64_t count,
                     Allocation& to) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<float> values, widened(t, count));
  return upload(what, values.data(), count * std::int64_t{sizeof(float)}, to);
}

// Parts of `values` [rows, columns], to the device.
Status upload_parts(const std::vector<float>& values, std::int64_t columns, int count,
                    Allocation& to) {
  const auto numbers = values.size() * static_cast<std::size_t>(count);
  try {
    std::vector<std::uint16_t> parts(numbers);
    split_into_bf16_parts(values, columns, count, parts);
    return upload("gate weight", parts.data(), static_cast<std::int64_t>(numbers) * 2, to);
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory,
            fmt::format("gate: cannot allocate {} numbers on the host", numbers)};
  }
}

// To F32.
RoundLogitsParams rounding_params(const float* from, std::int64_t count,
                                  const gate::LogitRounding& rounding, void* to) {
  RoundLogitsParams p;
  p.from = from;
  p.count = count;
  p.linear = rounding.linear;
  p.logits = rounding.logits;
  p.to = to;
  return p;
}

Status check(std::string_view field, const ConstTensorView& t) {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(field, t.dtype));
  if (!t.present()) {
    return {StatusCode::kInvalidArgument, fmt::format("{}: got a null pointer", field)};
  }
  return expect_contiguous(field, t);
}

}  // namespace

Status round_logits(const float* from, std::int64_t count, const gate::LogitRounding& rounding,
                    void* to, DType to_dtype, void* stream) {
  if (rounding.none() && to == from) return {};
  RoundLogitsParams p = rounding_params(from, count, rounding, to);
  p.to_dtype = to_dtype;
  return check_call("gate: rounding of logits", launch_round_logits(p, stream));
}

Result<CudaGate> CudaGate::create(ConstTensorView weight, ConstTensorView bias,
                                  const gate::LogitRounding& rounding, DType rows_dtype) {
  if (weight.rank() != 2 || weight.dim(0) < 1 || weight.dim(1) < 1) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("gate weight: got {}, need [num_experts, hidden_size], both >= 1",
                              weight.shape.to_string()));
  }
  MOESAIC_RETURN_IF_ERROR(check("gate weight", weight));
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (weight.dim(0) > kMost || weight.dim(1) > kMost) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("gate weight: got {}, need at most {} experts and columns",
                              weight.shape.to_string(), kMost));
  }
  CudaGate gate;
  gate.rounding_ = rounding;
  MOESAIC_ASSIGN_OR_RETURN(gate.device_, current_device_traits());
  gate.experts_ = weight.dim(0);
  gate.hidden_ = weight.dim(1);
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(weight.dtype, weight.shape));
  const bool half = weight.dtype == DType::kF16 || rows_dtype == DType::kF16;
  const std::int64_t count = gate.experts_ * gate.hidden_;
  std::vector<float> values;
  if (half || weight.dtype != DType::kBF16) {
    MOESAIC_ASSIGN_OR_RETURN(values, widened(weight, count));
  }
  if (half) MOESAIC_RETURN_IF_ERROR(gate.upload_half(values));
  if (weight.dtype == DType::kBF16) {
    MOESAIC_RETURN_IF_ERROR(upload("gate weight", weight.data, bytes, gate.weight_));
  } else {
    // Several parts only where the tensor cores take them.
    GateParams of_parts = gate.params(nullptr, DType::kBF16, 0, nullptr);
    of_parts.parts = count_bf16_parts(values);
    const bool several =
        of_parts.parts > 1 && GatePlan(of_parts, gate.device_).of(1) != GateKernel::kWarpPerLogit;
    gate.parts_ = several || of_parts.parts == 1 ? of_parts.parts : 0;
    if (gate.parts_ > 0) {
      MOESAIC_RETURN_IF_ERROR(upload_parts(values, gate.hidden_, gate.parts_, gate.weight_));
    }
    if (gate.parts_ != 1) {
      MOESAIC_RETURN_IF_ERROR(upload("gate weight", values.data(), count * 4, gate.wide_));
    }
  }
  if (bias.present()) {
    MOESAIC_RETURN_IF_ERROR(expect_shape("gate bias", bias, {gate.experts_}));
    MOESAIC_RETURN_IF_ERROR(check("gate bias", bias));
    MOESAIC_RETURN_IF_ERROR(upload_as_f32("gate bias", bias, gate.experts_, gate.bias_));
  }
  const auto plan_for = [&](DType x_dtype) {
    return GatePlan(gate.params(nullptr, x_dtype, 0, nullptr), gate.device_);
  };
  gate.of_bf16_ = plan_for(DType::kBF16);
  gate.of_f16_ = plan_for(DType::kF16);
  gate.of_f32_ = plan_for(DType::kF32);
  return gate;
}

// Only where all of them are such numbers and the tensor cores take them.
Status CudaGate::upload_half(const std::vector<float>& values) {
  GateParams p = params(nullptr, DType::kF16, 0, nullptr);
  p.weight_f16 = true;
  p.weight_f32 = false;
  if (GatePlan(p, device_).of(1) == GateKernel::kWarpPerLogit) return {};
  std::vector<std::uint16_t> codes;
  try {
    codes.reserve(values.size());
    for (const float v : values) {
      const std::uint16_t code = f16_from_f32(v);
      if (f32_from_f16(code) != v && !MOESAIC_FAULT(cuda_gate_rounds_weights_to_f16)) return {};
      codes.push_back(code);
    }
  } catch (const std::bad_alloc&) {
    return {StatusCode::kOutOfMemory,
            fmt::format("gate: cannot allocate {} numbers on the host", values.size())};
  }
  return upload("gate weight", codes.data(), static_cast<std::int64_t>(codes.size()) * 2, half_);
}

const GatePlan& CudaGate::plan(DType x_dtype) const {
  return x_dtype == DType::kBF16 ? of_bf16_ : x_dtype == DType::kF16 ? of_f16_ : of_f32_;
}

GateParams CudaGate::params(const void* x, DType x_dtype, std::int64_t tokens,
                            float* logits) const {
  GateParams p;
  p.x = x;
  p.x_dtype = x_dtype;
  p.weight_f16 = x_dtype == DType::kF16 && half_.bytes() > 0;
  p.weight_f32 = !p.weight_f16 && (parts_ == 0 || (parts_ > 1 && x_dtype != DType::kBF16));
  p.weight = p.weight_f16 ? half_.as<void>() : p.weight_f32 ? wide_.as<void>() : weight_.as<void>();
  p.parts = p.weight_f32 || p.weight_f16 ? 1 : parts_;
  p.bias = bias_.as<float>();
  p.tokens = tokens;
  p.experts = static_cast<std::int32_t>(experts_);
  p.hidden = static_cast<std::int32_t>(hidden_);
  p.logits = logits;
  return p;
}

bool CudaGate::runs_prologue(DType x_dtype, std::int64_t tokens) const {
  return rounding_.none() && plan(x_dtype).of(tokens) == GateKernel::kOneWave;
}

Status CudaGate::enqueue(void* stream, const void* x, DType x_dtype, std::int64_t tokens,
                         float* logits, const ExpertsPrologue* prologue,
                         const float* row_factors) const {
  MOESAIC_RETURN_IF_ERROR(gate::check_linear_input(x_dtype, rounding_));
  GateParams p = params(x, x_dtype, tokens, logits);
  if (prologue != nullptr) p.prologue = *prologue;
  if (row_factors != nullptr) p.bias = nullptr;
  MOESAIC_RETURN_IF_ERROR(
      check_call("gate", launch_gate(p, plan(x_dtype).of(tokens), device_, stream)));
  if (row_factors == nullptr)
    return round_logits(logits, tokens * experts_, rounding_, logits, DType::kF32, stream);
  RoundLogitsParams after = rounding_params(logits, tokens * experts_, rounding_, logits);
  after.row_factors = row_factors;
  after.bias = bias_.as<float>();
  after.columns = static_cast<std::int32_t>(experts_);
  return check_call("gate: factors of rows", launch_round_logits(after, stream));
}

}  // namespace moesaic::cuda
