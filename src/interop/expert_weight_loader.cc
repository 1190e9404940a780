// Parameters with one row per expert slot of a rank.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>

#include "core/fault.h"
#include "experts/expert_fields.h"
#include "moesaic/eplb.h"
#include "moesaic/interop/expert_weights.h"

namespace moesaic {
namespace {

// [E_l, shape...].
Result<Shape> with_experts(std::int64_t experts, const Shape& shape) {
  std::vector<std::int64_t> dims(shape.dims().begin(), shape.dims().end());
  dims.insert(dims.begin(), experts);
  return Shape::from(dims);
}

Status check_same(std::string_view field, std::int64_t expert, const ConstTensorView& got,
                  const Tensor& stack) {
  const bool present = stack.present();
  const std::string context = fmt::format("expert {}: {}", expert, field);
  if (got.present() != present) {
    return {StatusCode::kInvalidShape,
            fmt::format("{}: got {}, the experts before have {}", context,
                        got.present() ? "one" : "none", present ? "one" : "none")};
  }
  if (!present) return {};
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(context, got));
  MOESAIC_RETURN_IF_ERROR(expect_device(context, got, Device::cpu()));
  MOESAIC_RETURN_IF_ERROR(expect_dtype(context, got, stack.dtype()));
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, Shape::from(stack.shape().dims().subspan(1)));
  MOESAIC_RETURN_IF_ERROR(expect_shape(context, got, shape));
  // Where one expert ends in mid-byte, the next one does not begin.
  return contiguous_bytes(got.dtype, got.shape).status().with_context(context);
}

}  // namespace

Result<TensorView> expert_rows(std::string_view field, TensorView parameter) {
  if (parameter.rank() == 0) {
    return Status(StatusCode::kInvalidShape,
                  fmt::format("{}: got a scalar, need [experts, ...]", field));
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, parameter.shape.num_elements());
  const std::int64_t experts = parameter.dim(0);
  const Shape rows = {experts, experts > 0 ? count / experts : 0};
  const TensorView view(parameter.data, parameter.dtype, rows, parameter.device);
  if (parameter.is_contiguous()) return view;
  const bool transposed = parameter.rank() == 3 && parameter.strides[1] == 1 &&
                          parameter.strides[2] == parameter.dim(1) &&
                          parameter.strides[0] == parameter.dim(1) * parameter.dim(2);
  if (transposed) return view;
  return Status(StatusCode::kInvalidLayout,
                fmt::format("{}: got {} with strides, need it contiguous or with its last two axes "
                            "transposed",
                            field, parameter.shape.to_string()));
}

struct ExpertWeightLoader::Impl {
  std::vector<std::int32_t> local;
  std::array<Tensor, experts::kExpertFields.size()> stacks;

  Status allocate(const ExpertWeightsView& first) {
    for (std::size_t f = 0; f < stacks.size(); ++f) {
      const ConstTensorView& like = first.*experts::kExpertFields[f].view;
      if (!like.present()) continue;
      MOESAIC_ASSIGN_OR_RETURN(const Shape shape, with_experts(std::ssize(local), like.shape));
      MOESAIC_ASSIGN_OR_RETURN(stacks[f], Tensor::uninitialized(like.dtype, shape));
    }
    return {};
  }

  // Into every slot that holds logical expert `e`.
  Status place(std::int32_t e, const ExpertWeightsView& view) {
    for (std::size_t f = 0; f < stacks.size(); ++f) {
      const ConstTensorView& from = view.*experts::kExpertFields[f].view;
      MOESAIC_RETURN_IF_ERROR(check_same(experts::kExpertFields[f].name, e, from, stacks[f]));
      if (!from.present()) continue;
      const std::int64_t bytes = stacks[f].bytes() / std::ssize(local);
      for (std::size_t slot = 0; slot < local.size(); ++slot) {
        if (local[slot] != e) continue;
        std::memcpy(stacks[f].data() + static_cast<std::int64_t>(slot) * bytes, from.data,
                    static_cast<std::size_t>(bytes));
        if (MOESAIC_FAULT(loader_first_slot_only)) break;
      }
    }
    return {};
  }
};

Result<ExpertWeightLoader> ExpertWeightLoader::load(ExpertSource& source, std::int64_t num_logical,
                                                    const Options& options) {
  const auto slots = std::ssize(options.physical_to_logical);
  if (options.ep_size < 1 || slots % options.ep_size != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("physical_to_logical: got {} slots for ep_size {}, need a multiple",
                              slots, options.ep_size));
  }
  if (options.ep_rank < 0 || options.ep_rank >= options.ep_size) {
    return Status(StatusCode::kInvalidArgument, fmt::format("ep_rank: got {}, need 0 .. {}",
                                                            options.ep_rank, options.ep_size - 1));
  }
  // Every entry names an expert and every expert has a slot.
  MOESAIC_RETURN_IF_ERROR(make_expert_maps(options.physical_to_logical, num_logical).status());
  try {
    auto impl = std::make_unique<Impl>();
    const std::int64_t per_rank = slots / options.ep_size;
    const auto first = options.physical_to_logical.begin() + options.ep_rank * per_rank;
    impl->local.assign(first, first + per_rank);
    std::vector<std::int32_t> distinct = impl->local;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    for (std::size_t i = 0; i < distinct.size(); ++i) {
      MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(distinct[i]));
      if (i == 0) MOESAIC_RETURN_IF_ERROR(impl->allocate(view));
      MOESAIC_RETURN_IF_ERROR(impl->place(distinct[i], view));
    }
    return ExpertWeightLoader(std::move(impl));
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "cannot allocate the experts of a rank");
  }
}

std::int64_t ExpertWeightLoader::num_local_experts() const { return std::ssize(impl_->local); }
std::span<const std::int32_t> ExpertWeightLoader::local_experts() const { return impl_->local; }

StackedExpertWeights ExpertWeightLoader::weights() const {
  StackedExpertWeights weights;
  for (std::size_t f = 0; f < impl_->stacks.size(); ++f) {
    const Tensor& stack = impl_->stacks[f];
    if (stack.present()) weights.*experts::kExpertFields[f].view = stack.view();
  }
  return weights;
}

std::vector<ExpertWeightLoader::Rows> ExpertWeightLoader::get_expert_weights() {
  std::vector<Rows> all;
  for (std::size_t f = 0; f < impl_->stacks.size(); ++f) {
    Tensor& stack = impl_->stacks[f];
    if (!stack.present()) continue;
    // Contiguous by construction.
    all.push_back({experts::kExpertFields[f].name,
                   *expert_rows(experts::kExpertFields[f].name, stack.view())});
  }
  return all;
}

ExpertWeightLoader::ExpertWeightLoader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertWeightLoader::ExpertWeightLoader(ExpertWeightLoader&&) noexcept = default;
ExpertWeightLoader& ExpertWeightLoader::operator=(ExpertWeightLoader&&) noexcept = default;
ExpertWeightLoader::~ExpertWeightLoader() = default;

}  // namespace moesaic
