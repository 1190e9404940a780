// GateLinear: checks, threading, and the rounding of logits. The dot products are the tier's
// (cpu/gate-inl.h).
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "core/row_span.h"
#include "cpu/kernels.h"
#include "cpu/team.h"
#include "cpu/tiers.h"
#include "gate/cpu/gate.h"
#include "gate/device_gate.h"
#include "gate/rounding.h"
#include "moesaic/gate.h"
#include "numerics/codec.h"
#include "numerics/element.h"

namespace moesaic {
namespace {

// One work item: 32 x 16 logits. 16 rows of W (at most 7168 fp32 each) fit a second-level cache
// while 32 tokens pass; a decode step of one token still splits into E / 16 items.
constexpr std::int64_t kTokenBlock = 32;
constexpr std::int64_t kExpertBlock = 16;

Status null_data(std::string_view field) {
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{}: got a null pointer, need {}'s elements", field, field));
}

Status check_weight(std::string_view field, const ConstTensorView& t) {
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype(field, t.dtype));
  return expect_contiguous(field, t);
}

Status expect_rows_apart(const ConstTensorView& x, std::string_view field,
                         const ConstTensorView& other) {
  MOESAIC_ASSIGN_OR_RETURN(const ConstTensorView rows, row_span("hidden_states", x));
  return expect_no_overlap("hidden_states", rows, field, other);
}

}  // namespace

struct GateLinear::Impl {
  const cpu::CpuKernels* kernels = nullptr;
  Tensor weight;            // [E, H] as given; widening to fp32 happens in registers
  std::vector<float> bias;  // empty: none
  std::optional<DType> logits_dtype;
  // Of the linear's result; where it is not force_fp32_compute's F32, the weight's.
  DType linear_dtype = DType::kF32;
  bool force_fp32_compute = true;
  int num_threads = 1;
  std::int64_t expert_count = 0, row_size = 0;
  Device device = Device::cpu();
  std::unique_ptr<gate::DeviceGate> gpu = nullptr;  // instead of weight and bias

  std::int64_t experts() const { return expert_count; }
  std::int64_t hidden() const { return row_size; }
  gate::LogitRounding rounding() const {
    return {linear_dtype, logits_dtype.value_or(linear_dtype)};
  }
  int team_size(std::int64_t rows) const {
    return cpu::team_size(gate::cpu_gate_us(rows, experts(), hidden()), num_threads);
  }

  // What forward says of a call's tensors.
  Status check(const ConstTensorView& hidden_states, const TensorView& router_logits) const;
  // Logits of all rows of `op`, rounded when they are stored.
  void compute(const cpu::GateOperands& op, std::int64_t rows, const TensorView& out) const;
};

void GateLinear::Impl::compute(const cpu::GateOperands& op, std::int64_t rows,
                               const TensorView& out) const {
  const std::int64_t num_experts = experts();
  const std::int64_t expert_blocks = ceil_div(num_experts, kExpertBlock);
  const std::int64_t items = ceil_div(rows, kTokenBlock) * expert_blocks;
  const bool add_bias = !bias.empty() && !MOESAIC_FAULT(gate_skip_bias);
  const DType linear = MOESAIC_FAULT(gate_linear_stays_fp32) ? DType::kF32 : linear_dtype;
#pragma omp parallel num_threads(team_size(rows))
  {
    const cpu::ScopedIeeeMode ieee;
#pragma omp for schedule(static)
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t t_begin = item / expert_blocks * kTokenBlock;
      const std::int64_t e_begin = item % expert_blocks * kExpertBlock;
      const std::int64_t t_end = std::min(rows, t_begin + kTokenBlock);
      const std::int64_t e_end = std::min(num_experts, e_begin + kExpertBlock);
      float block[kTokenBlock * kExpertBlock];
      kernels->gate_logits(op, {t_begin, t_end, e_begin, e_end, block, kExpertBlock});
      for (std::int64_t t = t_begin; t < t_end; ++t) {
        for (std::int64_t e = e_begin; e < e_end; ++e) {
          float logit = block[(t - t_begin) * kExpertBlock + (e - e_begin)];
          if (add_bias) logit += bias[static_cast<std::size_t>(e)];
          if (MOESAIC_FAULT(gate_round_logits_to_bf16)) logit = f32_from_bf16(bf16_from_f32(logit));
          store_from_f32(out.data, out.dtype, t * num_experts + e, gate::rounded_to(logit, linear));
        }
      }
    }
  }
}

Result<GateLinear> GateLinear::create(ConstTensorView weight, ConstTensorView bias,
                                      const Options& options) {
  if (weight.rank() != 2 || weight.dim(0) < 1 || weight.dim(1) < 1) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("gate weight: got {}, need [num_experts, hidden_size], both >= 1",
                              weight.shape.to_string()));
  }
  MOESAIC_RETURN_IF_ERROR(check_weight("gate weight", weight));
  if (!weight.present()) return null_data("gate weight");
  const std::int64_t num_experts = weight.dim(0);
  if (bias.present()) {
    MOESAIC_RETURN_IF_ERROR(expect_shape("gate bias", bias, {num_experts}));
    MOESAIC_RETURN_IF_ERROR(check_weight("gate bias", bias));
  }
  if (options.logits_dtype) {
    MOESAIC_RETURN_IF_ERROR(expect_float_dtype("logits_dtype", *options.logits_dtype));
  }
  MOESAIC_RETURN_IF_ERROR(expect_threads(options.num_threads));
  // Copied from there, to whichever device.
  MOESAIC_RETURN_IF_ERROR(expect_device("gate weight", weight, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_device("gate bias", bias, Device::cpu()));

  const DType linear_dtype = options.force_fp32_compute ? DType::kF32 : weight.dtype;
  if (options.device.is_cuda()) {
    MOESAIC_ASSIGN_OR_RETURN(std::unique_ptr<gate::DeviceGate> gpu,
                             gate::make_device_gate(weight, bias, options));
    std::unique_ptr<Impl> impl(new (std::nothrow) Impl());
    if (!impl) return Status(StatusCode::kOutOfMemory, "gate: cannot allocate the object");
    impl->logits_dtype = options.logits_dtype;
    impl->linear_dtype = linear_dtype;
    impl->force_fp32_compute = options.force_fp32_compute;
    impl->expert_count = num_experts;
    impl->row_size = weight.dim(1);
    impl->device = options.device;
    impl->gpu = std::move(gpu);
    return GateLinear(std::move(impl));
  }
  MOESAIC_ASSIGN_OR_RETURN(const cpu::CpuKernels* kernels, cpu::current_kernels());
  MOESAIC_ASSIGN_OR_RETURN(Tensor copy, Tensor::uninitialized(weight.dtype, weight.shape));
  std::memcpy(copy.data(), weight.data, static_cast<std::size_t>(copy.bytes()));
  try {
    std::vector<float> bias_f32;
    if (bias.present()) {
      bias_f32.resize(static_cast<std::size_t>(num_experts));
      for (std::size_t e = 0; e < bias_f32.size(); ++e) {
        bias_f32[e] = load_as_f32(bias.data, bias.dtype, static_cast<std::int64_t>(e));
      }
    }
    return GateLinear(std::unique_ptr<Impl>(
        new Impl{kernels, std::move(copy), std::move(bias_f32), options.logits_dtype, linear_dtype,
                 options.force_fp32_compute, cpu::resolve_threads(options.num_threads), num_experts,
                 weight.dim(1)}));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("gate: cannot allocate the state of {} experts", num_experts));
  }
}

Status GateLinear::set_logits_dtype(DType dtype) {
  std::optional<DType>& to = impl_->logits_dtype;
  if (to && !MOESAIC_FAULT(gate_logits_dtype_set_twice)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("logits_dtype: got {} but {} is already set, need it set only once",
                              dtype_name(dtype), dtype_name(*to)));
  }
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("logits_dtype", dtype));
  to = dtype;
  return {};
}

Status GateLinear::Impl::check(const ConstTensorView& hidden_states,
                               const TensorView& router_logits) const {
  const std::int64_t hidden_size = hidden();
  if (hidden_states.rank() != 2 || hidden_states.dim(1) != hidden_size ||
      hidden_states.dim(0) < 0) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("hidden_states: got {}, need [num_tokens, {}]",
                              hidden_states.shape.to_string(), hidden_size));
  }
  const std::int64_t num_tokens = hidden_states.dim(0);
  MOESAIC_RETURN_IF_ERROR(expect_float_dtype("hidden_states", hidden_states.dtype));
  if (!force_fp32_compute && !logits_dtype && hidden_states.dtype != linear_dtype) {
    return Status(StatusCode::kInvalidDType,
                  fmt::format("hidden_states: got {}, need {}, the weight's dtype, while "
                              "logits_dtype is unset and force_fp32_compute is false",
                              dtype_name(hidden_states.dtype), dtype_name(linear_dtype)));
  }
  const gate::LogitRounding want = rounding();
  MOESAIC_RETURN_IF_ERROR(gate::check_linear_input(hidden_states.dtype, want));
  MOESAIC_RETURN_IF_ERROR(expect_shape("router_logits", router_logits, {num_tokens, experts()}));
  MOESAIC_RETURN_IF_ERROR(expect_dtype("router_logits", router_logits, want.logits));
  if (num_tokens == 0) return {};
  MOESAIC_RETURN_IF_ERROR(expect_device("hidden_states", hidden_states, device));
  MOESAIC_RETURN_IF_ERROR(expect_device("router_logits", router_logits, device));
  MOESAIC_RETURN_IF_ERROR(expect_contiguous("router_logits", router_logits));
  if (!hidden_states.present()) return null_data("hidden_states");
  if (hidden_size > 1 && hidden_states.strides[1] != 1) {
    return Status(StatusCode::kInvalidLayout,
                  fmt::format("hidden_states: got a stride of {} elements inside a row, need 1",
                              hidden_states.strides[1]));
  }
  return expect_rows_apart(hidden_states, "router_logits", router_logits);
}

Status GateLinear::forward(ConstTensorView hidden_states, TensorView router_logits,
                           Stream stream) const {
  MOESAIC_RETURN_IF_ERROR(impl_->check(hidden_states, router_logits));
  const std::int64_t num_tokens = hidden_states.dim(0);
  if (num_tokens == 0) return {};
  if (impl_->gpu) {
    return impl_->gpu->forward(hidden_states, router_logits, impl_->rounding(), stream, {});
  }
  cpu::GateOperands op;
  op.x = hidden_states.data;
  op.x_dtype = hidden_states.dtype;
  // The stride of a single row may be anything.
  op.x_row_bytes = num_tokens > 1 ? hidden_states.strides[0] * (dtype_bits(op.x_dtype) / 8) : 0;
  op.weight = impl_->weight.data();
  op.weight_dtype = impl_->weight.dtype();
  op.hidden_size = impl_->hidden();

  impl_->compute(op, num_tokens, router_logits);
  return {};
}

Result<std::int64_t> GateLinear::workspace_size(std::int64_t tokens) const {
  if (tokens < 0) {
    return Status(StatusCode::kInvalidArgument, fmt::format("tokens: got {}, need >= 0", tokens));
  }
  if (!impl_->gpu || logits_dtype() == DType::kF32) return 0;
  const auto logits = checked_mul(tokens, impl_->experts());
  const auto bytes = logits ? checked_mul(*logits, 4) : std::nullopt;
  if (!bytes) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("tokens: got {}, whose logits exceed 2^63-1 bytes", tokens));
  }
  return *bytes;
}

Status GateLinear::enqueue(Stream stream, ConstTensorView hidden_states, TensorView router_logits,
                           std::span<std::byte> workspace) const {
  if (!impl_->gpu) return unsupported("enqueue: got a gate on the CPU, need one on a GPU");
  MOESAIC_RETURN_IF_ERROR(impl_->check(hidden_states, router_logits));
  if (hidden_states.dim(0) == 0) return {};
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, workspace_size(hidden_states.dim(0)));
  if (std::ssize(workspace) < bytes) {
    return {StatusCode::kWorkspaceTooSmall,
            fmt::format("workspace: got {} bytes, need {}", workspace.size(), bytes)};
  }
  const ConstTensorView sums(workspace.data(), DType::kU8, {bytes}, impl_->device);
  MOESAIC_RETURN_IF_ERROR(expect_rows_apart(hidden_states, "workspace", sums));
  MOESAIC_RETURN_IF_ERROR(expect_no_overlap("workspace", sums, "router_logits", router_logits));
  return impl_->gpu->forward(hidden_states, router_logits, impl_->rounding(), stream, workspace);
}

std::int64_t GateLinear::num_experts() const { return impl_->experts(); }
std::int64_t GateLinear::hidden_size() const { return impl_->hidden(); }
DType GateLinear::logits_dtype() const { return impl_->rounding().logits; }
Device GateLinear::device() const { return impl_->device; }

GateLinear::GateLinear(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GateLinear::GateLinear(GateLinear&&) noexcept = default;
GateLinear& GateLinear::operator=(GateLinear&&) noexcept = default;
GateLinear::~GateLinear() = default;

}  // namespace moesaic
