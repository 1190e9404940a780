// Router: the fixed order of steps around the per-row rules. Source: docs/spec/routing.md section
// 2: route -> shared slots and padding -> capture callback -> EPLB mapping -> dtype of the ids.
#include "moesaic/router.h"

#include <fmt/format.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "core/fault.h"
#include "core/guarded.h"
#include "core/refusal.h"
#include "cpu/team.h"
#include "cpu/tiers.h"
#include "numerics/codec.h"
#include "router/device_router.h"
#include "router/eplb_map.h"
#include "router/route_row.h"
#include "router/router_checks.h"
#include "router/simulation.h"

namespace moesaic {
namespace {

// Scratch of a row that lies on the stack of its thread, enough for 1024 experts in any groups; more
// experts are routed in memory of the call's own.
constexpr std::int64_t kStackFloats = 6144;

std::vector<float> copy_floats(const ConstTensorView& t) {
  if (!t.present()) return {};
  const float* p = t.as<float>();
  return std::vector<float>(p, p + t.dim(0));
}

// From the first on: an id is read before its half of a later one's place is written.
void widen_in_place(std::byte* ids, std::int64_t count) {
  for (std::int64_t step = 0; step < count; ++step) {
    const std::int64_t i = MOESAIC_FAULT(router_widens_the_last_id_first) ? count - 1 - step : step;
    std::int32_t id = 0;
    std::memcpy(&id, ids + (count + i) * 4, sizeof id);
    const std::int64_t wide = id;
    std::memcpy(ids + i * 8, &wide, sizeof wide);
  }
}

}  // namespace

struct Router::Impl {
  router::RowRouter row;
  std::vector<std::int32_t> hash_table;  // [vocab, k]
  std::int64_t vision_token_base = 0;
  CustomRoutingFn custom;
  SimulationStrategyFn simulation;
  std::uint64_t seed = 0;
  std::int64_t num_shared = 0;
  float shared_weight = 1.0F;
  RoutingCaptureFn capture;
  int num_threads = 1;
  std::string name;
  std::unique_ptr<router::DeviceRouter> gpu;  // instead of everything above
  Device device = Device::cpu();

  std::int64_t slots() const { return row.spec.top_k + num_shared; }
  std::int64_t vocab() const {
    return static_cast<std::int64_t>(hash_table.size()) / row.spec.top_k;
  }
  Status select(const Args& args) const;
  void route_rows(const Args& args, std::int32_t* ids, int threads) const;
  void route_token(const Args& args, std::int64_t t, float* scratch, float* weights,
                   std::int32_t* ids) const;
  Status route_batch(const Args& args, std::int32_t* ids) const;
  void finish_row(std::int64_t t, bool padding, float* weights, std::int32_t* ids) const;
};

// One token by the per-row rule, and its share of zero_expert_output.
void Router::Impl::route_token(const Args& args, std::int64_t t, float* scratch, float* weights,
                               std::int32_t* ids) const {
  const std::int64_t columns = row.columns();
  const float* logits = args.router_logits.as<float>() + t * columns;
  if (args.router_logits.dtype != DType::kF32) {
    const std::uint16_t* codes = args.router_logits.as<std::uint16_t>() + t * columns;
    const bool bf16 = args.router_logits.dtype == DType::kBF16;
    for (std::int64_t e = 0; e < columns; ++e) {
      scratch[e] = bf16 ? f32_from_bf16(codes[e]) : f32_from_f16(codes[e]);
    }
    logits = scratch;
    scratch += columns;
  }
  const std::int32_t* table_ids = nullptr;
  if (!hash_table.empty()) {
    const std::int64_t token = MOESAIC_FAULT(router_hash_wrong_row)
                                   ? 0
                                   : std::int64_t{args.input_ids.as<std::int32_t>()[t]};
    if (!router::is_vision_token(token, vision_token_base)) {
      table_ids = hash_table.data() + token * row.spec.top_k;
    }
  }
  const float zero_weight = row.route(logits, table_ids, scratch, weights, ids);
  if (row.spec.num_zero_experts == 0) return;
  const std::int64_t hidden = args.hidden_states.dim(1);
  const ConstTensorView& x = args.hidden_states;
  for (std::int64_t h = 0; h < hidden; ++h) {
    store_from_f32(args.zero_expert_output.data, args.zero_expert_output.dtype, t * hidden + h,
                   zero_weight * load_as_f32(x.data, x.dtype, t * x.strides[0] + h));
  }
}

// Constant shared slots, or the row's erasure.
void Router::Impl::finish_row(std::int64_t t, bool padding, float* weights,
                              std::int32_t* ids) const {
  const std::int64_t begin = t * slots();
  if (padding && !MOESAIC_FAULT(router_keep_padding)) {
    std::fill_n(weights + begin, slots(), 0.0F);
    std::fill_n(ids + begin, slots(), -1);
    return;
  }
  for (std::int64_t i = 0; i < num_shared; ++i) {
    weights[begin + row.spec.top_k + i] =
        MOESAIC_FAULT(router_scale_shared) ? shared_weight * row.scale : shared_weight;
    ids[begin + row.spec.top_k + i] = static_cast<std::int32_t>(row.spec.num_experts + i);
  }
}

void Router::Impl::route_rows(const Args& args, std::int32_t* ids, int threads) const {
  const std::int64_t num_tokens = args.router_logits.dim(0);
  const std::uint8_t* padding = args.padding_mask.as<std::uint8_t>();
  float* weights = args.topk_weights.as<float>();
  const std::int64_t needed = row.scratch_floats() + row.columns();
  // A whole number of cache lines per thread, so that threads do not share one.
  const std::int64_t per_thread = round_up(needed, 16);
  const bool on_stack = needed <= kStackFloats && !MOESAIC_FAULT(router_scratch_on_heap);
  std::vector<float> wide(on_stack ? 0 : static_cast<std::size_t>(threads * per_thread));
#pragma omp parallel num_threads(threads)
  {
    const cpu::ScopedIeeeMode ieee;
    std::array<float, kStackFloats> narrow;
    float* const scratch =
        on_stack ? narrow.data() : wide.data() + omp_get_thread_num() * per_thread;
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const bool is_padding = padding != nullptr && padding[t] != 0;
      if (!is_padding || MOESAIC_FAULT(router_keep_padding)) {
        route_token(args, t, scratch, weights + t * slots(), ids + t * slots());
      } else if (row.spec.num_zero_experts > 0) {
        const std::int64_t row_bytes =
            args.zero_expert_output.dim(1) * (dtype_bits(args.zero_expert_output.dtype) / 8);
        std::fill_n(args.zero_expert_output.data + t * row_bytes, row_bytes, std::byte{0});
      }
      finish_row(t, is_padding, weights, ids);
    }
  }
}

// Custom and simulated routing see the batch at once.
Status Router::Impl::route_batch(const Args& args, std::int32_t* ids) const {
  const std::int64_t num_tokens = args.router_logits.dim(0);
  const std::int64_t k = row.spec.top_k;
  const std::uint8_t* padding = args.padding_mask.as<std::uint8_t>();
  float* weights = args.topk_weights.as<float>();
  // The function fills [M, k]; with shared slots the outputs are wider, and it fills their front.
  const TensorView weights_view(reinterpret_cast<std::byte*>(weights), DType::kF32,
                                {num_tokens, k});
  const TensorView ids_view(reinterpret_cast<std::byte*>(ids), DType::kI32, {num_tokens, k});
  const char* what = custom ? "custom routing function" : "simulation strategy";
  MOESAIC_RETURN_IF_ERROR(guarded(what, [&] {
    return custom ? custom(args.hidden_states, args.router_logits, row.spec.renormalize,
                           weights_view, ids_view)
                  : simulation(seed, row.spec.num_experts, weights_view, ids_view);
  }));
  const std::int32_t lowest = custom ? -1 : 0;
  for (std::int64_t p = 0; p < num_tokens * k; ++p) {
    if (ids[p] < lowest || ids[p] >= row.spec.num_experts) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{}: got id {} at [{}, {}], need {} to {}", what, ids[p], p / k, p % k,
                          lowest, row.spec.num_experts - 1)};
    }
  }
  // The last row first: a row moves to where no earlier one lies.
  for (std::int64_t step = num_tokens - 1; step >= 0; --step) {
    const std::int64_t t =
        MOESAIC_FAULT(router_moves_the_first_row_first) ? num_tokens - 1 - step : step;
    if (num_shared > 0) {
      std::copy_backward(weights + t * k, weights + (t + 1) * k, weights + t * slots() + k);
      std::copy_backward(ids + t * k, ids + (t + 1) * k, ids + t * slots() + k);
    }
    finish_row(t, padding != nullptr && padding[t] != 0, weights, ids);
  }
  return {};
}

Status Router::Impl::select(const Args& args) const {
  for (const auto& [field, view] :
       {std::pair{"hidden_states", args.hidden_states},
        std::pair{"router_logits", args.router_logits}, std::pair{"input_ids", args.input_ids},
        std::pair{"padding_mask", args.padding_mask},
        std::pair{"topk_weights", ConstTensorView(args.topk_weights)},
        std::pair{"topk_ids", ConstTensorView(args.topk_ids)},
        std::pair{"zero_expert_output", ConstTensorView(args.zero_expert_output)}}) {
    MOESAIC_RETURN_IF_ERROR(expect_device(field, view, Device::cpu()));
  }
  MOESAIC_RETURN_IF_ERROR(
      router::check_select_args(args, row.spec, slots(), vocab(), vision_token_base));
  if (args.eplb != nullptr) {
    if (num_shared > 0) {
      // Shared slots carry ids behind the logical experts, for which there is no replica map.
      return {StatusCode::kUnsupported,
              fmt::format("eplb: given with {} fused shared experts, need none", num_shared)};
    }
    MOESAIC_RETURN_IF_ERROR(router::check_eplb_state(*args.eplb, row.spec.num_experts));
  }
  const std::int64_t num_tokens = args.router_logits.dim(0);
  if (num_tokens == 0) return {};

  const bool whole_batch = custom || simulation;
  const std::int64_t wanted =
      cpu::team_size(router::route_rows_us(num_tokens, row.columns()), num_threads);
  const int threads = static_cast<int>(std::min(wanted, num_tokens));
  // Made in place: ids of 64 bits as 32 in the upper half of their memory, and widened at the end.
  const std::int64_t total = num_tokens * slots();
  const bool wide = args.topk_ids.dtype == DType::kI64;
  std::int32_t* ids = args.topk_ids.as<std::int32_t>() + (wide ? total : 0);

  if (whole_batch) {
    MOESAIC_RETURN_IF_ERROR(route_batch(args, ids));
  } else {
    route_rows(args, ids, threads);
  }
  if (capture) {
    MOESAIC_RETURN_IF_ERROR(guarded("capture callback", [&] {
      capture(ConstTensorView(reinterpret_cast<const std::byte*>(ids), DType::kI32,
                              {num_tokens, slots()}));
      return Status();
    }));
  }
  if (args.eplb != nullptr) {
    router::map_logical_to_physical(*args.eplb, row.spec.num_experts, num_tokens, slots(),
                                    args.padding_mask.as<std::uint8_t>(), ids);
  }
  if (wide) {
    widen_in_place(args.topk_ids.data, total);
  } else if (args.topk_ids.dtype == DType::kU32) {
    const auto negative = std::find_if(ids, ids + total, [](std::int32_t id) { return id < 0; });
    if (negative != ids + total) {
      const std::int64_t at = negative - ids;
      return {StatusCode::kInvalidArgument,
              fmt::format("topk_ids: got U32 and an empty slot (-1) at [{}, {}], need I32 or I64",
                          at / slots(), at % slots())};
    }
  }
  return {};
}

Result<Router> Router::create(const Options& options) {
  try {
    MOESAIC_ASSIGN_OR_RETURN(const RoutingSpec spec, router::effective_routing(options.spec));
    MOESAIC_RETURN_IF_ERROR(router::check_router_parts(options, spec));
    auto impl = std::make_unique<Impl>();
    impl->device = options.device;
    if (options.device.is_cuda()) {
      MOESAIC_ASSIGN_OR_RETURN(impl->gpu, router::make_device_router(options));
      return Router(std::move(impl));
    }
    impl->row.spec = spec;
    impl->row.bias = copy_floats(options.correction_bias);
    impl->row.vision_bias = copy_floats(options.vision_bias);
    impl->row.expert_scale = copy_floats(options.expert_scale);
    impl->row.scale = spec.scale_on_output ? 1.0F : static_cast<float>(spec.routed_scaling_factor);
    if (options.hash_table.present()) {
      const std::int32_t* table = options.hash_table.as<std::int32_t>();
      impl->hash_table.assign(table, table + options.hash_table.dim(0) * spec.top_k);
    }
    impl->vision_token_base = options.vision_token_base;
    impl->custom = options.custom;
    if (spec.method == RoutingMethod::kSimulated) {
      MOESAIC_ASSIGN_OR_RETURN(impl->simulation,
                               router::find_simulation_strategy(options.simulation_strategy));
    }
    impl->seed = options.seed;
    impl->num_shared = options.num_fused_shared_experts;
    impl->shared_weight = options.shared_expert_weight;
    impl->capture = options.capture;
    impl->num_threads = cpu::resolve_threads(options.num_threads);
    impl->name = router::router_name(spec, options.simulation_strategy);
    return Router(std::move(impl));
  } catch (const std::bad_alloc&) {
    return Status(
        StatusCode::kOutOfMemory,
        fmt::format("router: cannot allocate the state of {} experts", options.spec.num_experts));
  }
}

Status Router::select_experts(const Args& args) const {
  try {
    return impl_->gpu ? impl_->gpu->select_experts(args) : impl_->select(args);
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory,
                  fmt::format("router: cannot allocate the buffers of {} tokens",
                              args.router_logits.rank() > 0 ? args.router_logits.dim(0) : 0));
  }
}

Status Router::enqueue(Stream stream, const Args& args) const {
  if (!impl_->gpu) return unsupported("enqueue: got a router on the CPU, need one on a GPU");
  Args on_stream = args;
  on_stream.stream = stream;
  return impl_->gpu->select_experts(on_stream);
}

Result<std::int64_t> Router::workspace_size(std::int64_t tokens) const {
  if (tokens < 0) return invalid(fmt::format("tokens: got {}, need >= 0", tokens));
  return impl_->gpu ? impl_->gpu->workspace_size(tokens) : 0;
}

std::int64_t Router::slots() const { return impl_->gpu ? impl_->gpu->slots() : impl_->slots(); }
Device Router::device() const { return impl_->device; }
const RoutingSpec& Router::spec() const {
  return impl_->gpu ? impl_->gpu->spec() : impl_->row.spec;
}
std::string Router::name() const { return impl_->gpu ? impl_->gpu->name() : impl_->name; }

Router::Router(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Router::Router(Router&&) noexcept = default;
Router& Router::operator=(Router&&) noexcept = default;
Router::~Router() = default;

}  // namespace moesaic
