#include "layer/expert_store.h"

#include <fmt/format.h>

#include <cstring>
#include <new>
#include <set>
#include <utility>

#include "experts/expert_fields.h"

namespace moesaic::layer {
namespace {

Status no_memory() { return {StatusCode::kOutOfMemory, "cannot allocate an expert"}; }

}  // namespace

Result<std::shared_ptr<StoredExpert>> StoredExpert::copy(const ExpertWeightsView& view) {
  try {
    auto expert = std::make_shared<StoredExpert>();
    for (const experts::ExpertField& field : experts::kExpertFields) {
      const ConstTensorView& from = view.*field.view;
      Tensor& to = expert->tensors.emplace_back();
      if (!from.present()) continue;
      MOESAIC_RETURN_IF_ERROR(expect_contiguous("expert", from));
      MOESAIC_ASSIGN_OR_RETURN(to, Tensor::uninitialized(from.dtype, from.shape));
      if (to.bytes() > 0) {
        std::memcpy(to.data(), from.data, static_cast<std::size_t>(to.bytes()));
      }
    }
    return expert;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<std::shared_ptr<StoredExpert>> StoredExpert::allocate_like(const StoredExpert& like) {
  try {
    auto expert = std::make_shared<StoredExpert>();
    for (const Tensor& t : like.tensors) {
      Tensor& to = expert->tensors.emplace_back();
      if (!t.present()) continue;
      MOESAIC_ASSIGN_OR_RETURN(to, Tensor::uninitialized(t.dtype(), t.shape()));
    }
    return expert;
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

ExpertWeightsView StoredExpert::view() const {
  ExpertWeightsView view;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].present()) view.*experts::kExpertFields[i].view = tensors[i].view();
  }
  return view;
}

std::int64_t StoredExpert::bytes() const {
  std::int64_t sum = 0;
  for (const Tensor& t : tensors) sum += t.bytes();
  return sum;
}

void StoredExpert::write_to(std::byte* to) const {
  for (const Tensor& t : tensors) {
    if (t.bytes() > 0) std::memcpy(to, t.data(), static_cast<std::size_t>(t.bytes()));
    to += t.bytes();
  }
}

void StoredExpert::read_from(const std::byte* from) {
  for (Tensor& t : tensors) {
    if (t.bytes() > 0) std::memcpy(t.data(), from, static_cast<std::size_t>(t.bytes()));
    from += t.bytes();
  }
}

Result<std::unique_ptr<ExpertStore>> ExpertStore::load(ExpertSource& source,
                                                       std::span<const std::int32_t> ids) {
  try {
    Slots slots;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::size_t twin = 0;
      while (twin < i && ids[twin] != ids[i]) ++twin;
      if (twin < i) {
        slots.push_back(slots[twin]);
        continue;
      }
      MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView view, source.expert(ids[i]));
      MOESAIC_ASSIGN_OR_RETURN(auto expert, StoredExpert::copy(view));
      slots.push_back(std::move(expert));
    }
    return std::make_unique<ExpertStore>(std::move(slots));
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
}

Result<ExpertWeightsView> ExpertStore::expert(std::int64_t local_expert) {
  if (local_expert < 0 || local_expert >= std::ssize(slots_)) {
    return Status(StatusCode::kInvalidArgument, fmt::format("local_expert: got {}, need 0 .. {}",
                                                            local_expert, std::ssize(slots_) - 1));
  }
  return slots_[static_cast<std::size_t>(local_expert)]->view();
}

std::int64_t ExpertStore::bytes() const {
  std::set<const StoredExpert*> distinct;
  std::int64_t sum = 0;
  for (const auto& slot : slots_) {
    if (distinct.insert(slot.get()).second) sum += slot->bytes();
  }
  return sum;
}

}  // namespace moesaic::layer
