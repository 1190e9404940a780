#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "checkpoint/container/ggml_types.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"
#include "checkpoint/reader/expert_source.h"
#include "checkpoint/reader/held_parts.h"
#include "checkpoint/reader/layer_weights.h"
#include "checkpoint/reader/weight_loader_impl.h"
#include "core/fault.h"
#include "moesaic/device_tensor.h"

namespace moesaic {
namespace {

constexpr std::string_view kLabel = "pushed tensors";
// Looks at the names that told nothing new, after which only every second, fourth ... is made: a
// stream of names that mean nothing must not cost a walk over the layer each.
constexpr std::int64_t kPatience = 64;

bool is_of_all_experts(const checkpoint::LayerSource& source,
                       const checkpoint::PlannedTensor& tensor) {
  return !checkpoint::is_per_expert(source.layout->storage) || tensor.of_all_experts;
}

// A tensor of a GGUF type without blocks: as its numbers, or as the bytes of its rows.
Result<ConstTensorView> as_numbers(std::string_view field, const ConstTensorView& tensor,
                                   DType dtype) {
  if (tensor.dtype == dtype) return tensor;
  const std::int64_t size = dtype_bits(dtype) / 8;
  const int last = tensor.rank() - 1;
  if (tensor.dtype != DType::kU8 || last < 0 || tensor.dim(last) % size != 0) {
    return Status(StatusCode::kInvalidDType,
                  fmt::format("{}: got {} {} as GGUF type {}, need {}, or U8 of {} for each", field,
                              dtype_name(tensor.dtype), tensor.shape.to_string(), dtype_name(dtype),
                              dtype_name(dtype), size));
  }
  std::vector<std::int64_t> dims(tensor.shape.dims().begin(), tensor.shape.dims().end());
  dims.back() /= size;
  MOESAIC_ASSIGN_OR_RETURN(const Shape shape, Shape::from(dims));
  return ConstTensorView(tensor.data, dtype, shape, tensor.device);
}

}  // namespace

WeightLoader::Impl::Impl(checkpoint::ModelConfig config_in, const MoeLayerSpec& spec_in,
                         const Options& options_in)
    : config(std::move(config_in)),
      spec(spec_in),
      options(options_in),
      tensors(std::make_shared<checkpoint::PushedTensors>(std::string(kLabel))) {
  const checkpoint::Family& family = *config.family;
  if (family.layer_prefix.empty()) {
    layer_names_.push_back(spec.prefix + ".");
    return;
  }
  layer_names_.push_back(fmt::format("{}{}.", family.layer_prefix, spec.layer));
  for (const std::string_view prefix : checkpoint::layer_prefixes()) {
    layer_names_.push_back(fmt::format("{}{}.", prefix, spec.layer));
  }
}

Status WeightLoader::Impl::choose_experts() {
  MOESAIC_RETURN_IF_ERROR(options.parallel.validate());
  const std::vector<std::int32_t>& logical = options.physical_to_logical;
  const std::int64_t slots = logical.empty() ? spec.num_experts : std::ssize(logical);
  for (std::size_t slot = 0; slot < logical.size(); ++slot) {
    if (logical[slot] >= 0 && logical[slot] < spec.num_experts) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("physical_to_logical[{}]: got expert {}, need 0 to {}", slot, logical[slot],
                        spec.num_experts - 1)};
  }
  MOESAIC_ASSIGN_OR_RETURN(ids, local_expert_ids(slots, options.parallel));
  for (std::int64_t& id : ids) {
    if (!logical.empty()) id = logical[static_cast<std::size_t>(id)];
  }
  distinct = ids;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  return {};
}

void WeightLoader::Impl::resolve() {
  Result<checkpoint::LayerSource> found =
      checkpoint::resolve_layer(config, spec, checkpoint::ShardSet::of(tensors));
  if (!found.ok()) return;
  Known known;
  known.source = *std::move(found);
  for (PlannedTensor& tensor : checkpoint::plan_layer(*known.source)) {
    std::string name = tensor.name;
    known.plan.emplace(std::move(name), std::move(tensor));
  }
  const Result<checkpoint::MlpSlice> slice =
      checkpoint::expert_slice(*known.source, options.parallel);
  known.settled = slice.ok() && !checkpoint::has_twin(*known.source);
  known.slice = slice.ok() ? *slice : known_.slice;
  std::swap(known, known_);
  if (!before_) before_ = std::move(known);
}

Status WeightLoader::Impl::check_names_differ() const {
  if (!known_.source || MOESAIC_FAULT(pushed_name_of_two_tensors)) return {};
  std::set<std::string> seen;
  for (const PlannedTensor& tensor : checkpoint::plan_layer(*known_.source)) {
    if (seen.insert(tensor.name).second) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("names: got {} for two tensors, need a name of its own for each",
                        checkpoint::quote_name(tensor.name))};
  }
  return {};
}

// --- names ---

std::string WeightLoader::Impl::checkpoint_name(std::string_view pushed) const {
  std::string name(pushed);
  for (const NameReplacement& rule : options.names) {
    if (rule.from.empty() && MOESAIC_FAULT(pushed_empty_names_ignored)) continue;
    for (std::size_t at = name.find(rule.from); at != name.npos;
         at = name.find(rule.from, at + 1)) {
      if (at > 0 && name[at - 1] != '.') continue;
      name.replace(at, rule.from.size(), rule.to);
      break;
    }
  }
  return name;
}

bool WeightLoader::Impl::in_layer(std::string_view name) const {
  return std::any_of(layer_names_.begin(), layer_names_.end(),
                     [&](const std::string& begin) { return name.starts_with(begin); });
}

bool WeightLoader::Impl::may_be_wanted(std::string_view name) const {
  const auto& layouts = config.family->layouts;
  return std::any_of(layer_names_.begin(), layer_names_.end(),
                     [&](const std::string& begin) {
                       if (!name.starts_with(begin)) return false;
                       const std::string_view rest = name.substr(begin.size());
                       if (!known_.source) {
                         return std::any_of(layouts.begin(), layouts.end(),
                                            [&](const checkpoint::ExpertLayout& l) {
                                              return l.present() && rest.starts_with(l.block);
                                            });
                       }
                       // What the plan has under another beginning: the first tensor of the block settles which.
                       return std::any_of(layer_names_.begin(), layer_names_.end(),
                                          [&](const std::string& other) {
                                            return planned(other + std::string(rest)) != nullptr;
                                          });
                     }) ||
         (known_.source && checkpoint::in_block(*known_.source, name));
}

// --- what is wanted ---

const checkpoint::PlannedTensor* WeightLoader::Impl::planned(std::string_view name) const {
  const auto at = known_.plan.find(std::string(name));
  return at == known_.plan.end() ? nullptr : &at->second;
}

const checkpoint::PlannedTensor* WeightLoader::Impl::plan_for(const TensorInfo& info) {
  const PlannedTensor* plan = planned(info.name);
  if (plan != nullptr && checkpoint::check_form(*plan, info).ok()) return plan;
  const bool look = failures_ < kPatience || (failures_ & (failures_ - 1)) == 0;
  if (look) resolve();
  plan = planned(info.name);
  if (plan == nullptr) ++failures_;
  return plan;
}

bool WeightLoader::Impl::is_needed(const checkpoint::LayerSource& source,
                                   const PlannedTensor& tensor) const {
  if (tensor.part != checkpoint::LayerPart::kExpert) return !options.experts_only;
  if (checkpoint::counts_for_all_ranks(source.experts, tensor.kind)) return true;
  if (is_of_all_experts(source, tensor)) return !ids.empty();
  return std::binary_search(distinct.begin(), distinct.end(), tensor.expert);
}

bool WeightLoader::Impl::is_used(const PlannedTensor& tensor) const {
  return !tensor.unused && is_needed(*known_.source, tensor);
}

checkpoint::TensorNeeded WeightLoader::Impl::needed() const {
  return [this](const checkpoint::LayerSource& source, const PlannedTensor& tensor) {
    return MOESAIC_FAULT(pushed_partial_set_is_enough) ? false : is_needed(source, tensor);
  };
}

std::vector<checkpoint::ByteRuns> WeightLoader::Impl::runs(const PlannedTensor& tensor,
                                                           const TensorInfo& info) const {
  if (tensor.part != checkpoint::LayerPart::kExpert) return {checkpoint::whole_tensor(info)};
  return checkpoint::held_runs(tensor, info, known_.slice, distinct, known_.settled);
}

// --- taking ---

Result<bool> WeightLoader::Impl::load(std::string_view pushed, ConstTensorView tensor,
                                      quant::GgufType type) {
  if (finished) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: pushed after finish, need a loader of its own",
                              checkpoint::quote_name(pushed)));
  }
  const std::string name = checkpoint_name(pushed);
  if (!in_layer(name)) return false;
  const std::string field = checkpoint::quote_name(name);
  MOESAIC_RETURN_IF_ERROR(expect_contiguous(field, tensor));
  const auto plain = checkpoint::plain_ggml_type(static_cast<std::uint32_t>(type));
  if (plain && !MOESAIC_FAULT(pushed_numbers_are_blocks)) {
    MOESAIC_ASSIGN_OR_RETURN(tensor, as_numbers(field, tensor, *plain));
    type = quant::GgufType::kNone;
  }
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(tensor.dtype, tensor.shape));
  if (tensor.data == nullptr && bytes > 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: got no data, need {} bytes", field, bytes));
  }
  const TensorInfo* twin = tensors->find(name);
  if (twin != nullptr && MOESAIC_FAULT(pushed_twice_replaces)) {
    waiting_.erase(name);
    tensors->forget(*twin);
  }
  MOESAIC_ASSIGN_OR_RETURN(const TensorInfo* const info,
                           tensors->add(name, tensor.dtype, tensor.shape, type));
  before_.reset();
  Result<bool> kept = checkpoint::guard_allocation(kLabel, [&] { return take(*info, tensor); });
  if (!kept.ok()) {
    tensors->forget(*info);
    waiting_.erase(name);
    if (MOESAIC_FAULT(pushed_failures_are_believed)) {
      settle_waiting();
    } else if (before_) {
      known_ = *std::move(before_);
    }
    before_.reset();
    if (name == pushed) return kept.status();
    return kept.status().with_context(fmt::format("pushed as {}", checkpoint::quote_name(pushed)));
  }
  // Not before: of what waited, this may let bytes go for good. Where memory ends they go on waiting.
  static_cast<void>(checkpoint::guard_allocation(kLabel, [&] {
    if (before_ && planned(name) != nullptr) settle_waiting();
    return Status();
  }));
  before_.reset();
  return kept;
}

bool WeightLoader::Impl::looks_at(std::string_view name) const {
  return finished || in_layer(checkpoint_name(name));
}

Status WeightLoader::Impl::keep(const TensorInfo& info, std::span<const checkpoint::ByteRuns> runs,
                                const ConstTensorView& tensor) {
  if (!tensor.device.is_cuda()) return tensors->keep(info, runs, tensor.data);
  MOESAIC_ASSIGN_OR_RETURN(Tensor host, Tensor::uninitialized(tensor.dtype, tensor.shape));
  MOESAIC_RETURN_IF_ERROR(
      copy_tensor(tensor, host.view()).with_context(checkpoint::quote_name(info.name)));
  return tensors->keep(info, runs, host.data());
}

Result<bool> WeightLoader::Impl::take(const TensorInfo& info, const ConstTensorView& tensor) {
  const PlannedTensor* plan = plan_for(info);
  const std::vector<checkpoint::ByteRuns> whole = {checkpoint::whole_tensor(info)};
  if (plan == nullptr) {
    if (!may_be_wanted(info.name)) {  // another part of the layer
      tensors->forget(info);
      return false;
    }
    MOESAIC_RETURN_IF_ERROR(keep(info, whole, tensor));
    waiting_.insert(info.name);
    return true;
  }
  const Status form = checkpoint::check_form(*plan, info);
  if (!form.ok() && !MOESAIC_FAULT(pushed_any_form)) {
    if (!may_fit_later(*plan)) return form;
    MOESAIC_RETURN_IF_ERROR(keep(info, whole, tensor));
    waiting_.insert(info.name);
    return true;
  }
  if (!is_used(*plan)) {
    // What is none of the caller's business is none of the layer's either.
    if (plan->part != checkpoint::LayerPart::kExpert) tensors->forget(info);
    return false;
  }
  MOESAIC_RETURN_IF_ERROR(
      keep(info, MOESAIC_FAULT(pushed_keeps_everything) ? whole : runs(*plan, info), tensor));
  return true;
}

bool WeightLoader::Impl::may_fit_later(const PlannedTensor& tensor) const {
  // GGUF tensors each have a type of their own; two layouts with the same names are told apart by
  // the shapes of both tensors; the size of bitsandbytes' blocks is read off the scales.
  return config.gguf ||
         (tensor.part == checkpoint::LayerPart::kExpert && checkpoint::has_twin(*known_.source)) ||
         (known_.source->experts.stored == checkpoint::StoredFormat::kBnb4 &&
          tensor.kind == checkpoint::TensorKind::kScale);
}

void WeightLoader::Impl::settle_waiting() {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const TensorInfo* info = tensors->find(*at);
    const PlannedTensor* plan = planned(*at);
    const bool of_nobody = plan == nullptr
                               ? !may_be_wanted(*at)
                               : plan->part != checkpoint::LayerPart::kExpert && !is_used(*plan) &&
                                     !MOESAIC_FAULT(pushed_router_waits_for_nobody);
    if (info != nullptr && of_nobody) {
      tensors->forget(*info);
      at = waiting_.erase(at);
      continue;
    }
    if (info == nullptr || plan == nullptr || !checkpoint::check_form(*plan, *info).ok()) {
      ++at;
      continue;
    }
    // A cut cannot fail for another reason than memory, and then the whole stays.
    const auto wanted = is_used(*plan) ? runs(*plan, *info) : std::vector<checkpoint::ByteRuns>();
    if (!tensors->cut(*info, wanted).ok()) {
      ++at;
      continue;
    }
    at = waiting_.erase(at);
  }
}

Result<std::vector<std::string>> WeightLoader::Impl::missing() const {
  const checkpoint::ShardSet shards = checkpoint::ShardSet::of(tensors);
  MOESAIC_ASSIGN_OR_RETURN(const checkpoint::LayerSource source,
                           checkpoint::resolve_layer(config, spec, shards));
  return checkpoint::missing_names(source, shards, needed());
}

Result<MoeLayerWeights> WeightLoader::Impl::finish() {
  if (finished) {
    return Status(StatusCode::kInvalidArgument, "finish: called twice, need a loader of its own");
  }
  auto shards = std::make_shared<const checkpoint::ShardSet>(checkpoint::ShardSet::of(tensors));
  const bool cut_shared = options.cut_shared && !MOESAIC_FAULT(pushed_shared_stays_whole);
  MOESAIC_ASSIGN_OR_RETURN(
      checkpoint::BoundLayer layer,
      checkpoint::check_bound_layer(config, spec, *shards, options.parallel, options.input_scales,
                                    needed(), cut_shared));
  MOESAIC_ASSIGN_OR_RETURN(
      MoeLayerWeights weights,
      checkpoint::make_layer_weights(std::move(shards), std::move(layer), options.parallel, ids,
                                     options.input_scales, std::string(kLabel), {}, cut_shared));
  finished = true;
  tensors = std::make_shared<checkpoint::PushedTensors>(std::string(kLabel));
  known_.plan.clear();
  return weights;
}

// --- the public face ---

WeightLoader::WeightLoader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WeightLoader::WeightLoader(WeightLoader&&) noexcept = default;
WeightLoader& WeightLoader::operator=(WeightLoader&&) noexcept = default;
WeightLoader::~WeightLoader() = default;

Result<WeightLoader> WeightLoader::make(checkpoint::ModelConfig config, int index,
                                        const Options& options) {
  const auto found = std::find_if(config.layers.begin(), config.layers.end(),
                                  [&](const MoeLayerSpec& layer) { return layer.layer == index; });
  if (found == config.layers.end()) return checkpoint::no_such_layer(config, index);
  const MoeLayerSpec spec = *found;
  auto impl = std::make_unique<Impl>(std::move(config), spec, options);
  MOESAIC_RETURN_IF_ERROR(impl->choose_experts());
  impl->resolve();
  return WeightLoader(std::move(impl));
}

Result<bool> WeightLoader::load(std::string_view name, ConstTensorView tensor) {
  return checkpoint::guard_allocation(
      kLabel, [&] { return impl_->load(name, tensor, quant::GgufType::kNone); });
}

Result<bool> WeightLoader::load(std::string_view name, ConstTensorView tensor,
                                std::uint32_t ggml_type) {
  const bool plain = checkpoint::plain_ggml_type(ggml_type).has_value();
  if (!plain && quant::gguf_type_info(ggml_type) == nullptr && looks_at(name)) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("{}: got GGUF type {}, need one of {}", checkpoint::quote_name(name),
                              ggml_type, quant::gguf_type_names()));
  }
  return checkpoint::guard_allocation(
      kLabel, [&] { return impl_->load(name, tensor, static_cast<quant::GgufType>(ggml_type)); });
}

Result<std::vector<std::string>> WeightLoader::load_weights(std::span<const NamedTensor> tensors) {
  std::vector<std::string> names;
  for (const NamedTensor& tensor : tensors) {
    MOESAIC_ASSIGN_OR_RETURN(const bool kept, load(tensor.name, tensor.tensor));
    if (kept) names.push_back(tensor.name);
  }
  return names;
}

Result<std::vector<std::string>> WeightLoader::missing() const {
  return checkpoint::guard_allocation(kLabel, [&] { return impl_->missing(); });
}

bool WeightLoader::looks_at(std::string_view name) const {
  const Result<bool> looked_at =
      checkpoint::guard_allocation(kLabel, [&]() -> Result<bool> { return impl_->looks_at(name); });
  return !looked_at.ok() || *looked_at;  // load says what was the matter
}

std::int64_t WeightLoader::bytes() const { return impl_->tensors->kept_bytes(); }

Result<MoeLayerWeights> WeightLoader::finish() {
  return checkpoint::guard_allocation(kLabel, [&] { return impl_->finish(); });
}

}  // namespace moesaic
