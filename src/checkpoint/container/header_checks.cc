// What one entry and all entries together must satisfy.
#include <algorithm>
#include <functional>
#include <utility>

#include "checkpoint/container/header_builder.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::checkpoint {

// The checks that need only this entry. Everything is exact 64-bit arithmetic.
bool HeaderBuilder::finish_entry() {
  for (const auto& [bit, field] :
       {std::pair<unsigned, const char*>{1, "dtype"}, {2, "shape"}, {4, "data_offsets"}}) {
    if ((fields_ & bit) == 0) {
      return fail_tensor(StatusCode::kCorruptFile, fmt::format("{} is missing", field));
    }
  }
  TensorInfo& t = current_;
  if (t.end < t.begin) {
    return fail_tensor(
        StatusCode::kCorruptFile,
        fmt::format("data_offsets: got [{}, {}], need begin <= end", t.begin, t.end));
  }
  const auto bits_per_element = static_cast<std::uint64_t>(dtype_bits(t.dtype));
  const auto bits =
      elements_overflow_ ? std::nullopt : checked_mul_u64(elements_, bits_per_element);
  if (!bits) {
    return fail_tensor(StatusCode::kLimitExceeded,
                       fmt::format("shape: overflow: the {} of {} elements exceed 2^64-1",
                                   elements_overflow_ ? "number" : "bits", dtype_name(t.dtype)));
  }
  if (dim_overflow_) {
    return fail_tensor(StatusCode::kLimitExceeded, "shape: a dimension exceeds 2^63-1");
  }
  if (t.rank <= kMaxRank) {
    auto shape = Shape::from({dims_.data(), static_cast<std::size_t>(t.rank)});
    if (!shape.ok()) return fail_tensor(StatusCode::kInternal, shape.status().message());
    t.shape = *shape;
  }
  const std::string what =
      *bits % 8 == 0 && t.bytes() == *bits / 8
          ? std::string()  // building text for every good tensor would double the parse time
          : fmt::format(
                "{} {}", dtype_name(t.dtype),
                t.rank <= kMaxRank ? t.shape.to_string() : fmt::format("of rank {}", t.rank));
  if (*bits % 8 != 0) {
    return fail_tensor(StatusCode::kCorruptFile,
                       fmt::format("misaligned: {} is {} bits, need whole bytes", what, *bits));
  }
  if (!what.empty()) {
    return fail_tensor(StatusCode::kCorruptFile,
                       fmt::format("data_offsets: got [{}, {}] which is {} bytes, need {} for {}",
                                   t.begin, t.end, t.bytes(), *bits / 8, what));
  }
  out_.tensors_.push_back(std::move(t));
  return true;
}

// By (begin, end, order in the header), in place: positions are sorted, then the cycles followed.
void HeaderBuilder::sort_by_offset() {
  auto& tensors = out_.tensors_;
  const auto before = [](const TensorInfo& a, const TensorInfo& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  };
  if (std::is_sorted(tensors.begin(), tensors.end(), before)) return;
  std::vector<std::uint32_t> order(tensors.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    if (before(tensors[a], tensors[b])) return true;
    return !before(tensors[b], tensors[a]) && a < b;
  });
  for (std::uint32_t i = 0; i < order.size(); ++i) {
    if (order[i] == i) continue;
    TensorInfo first = std::move(tensors[i]);
    std::uint32_t hole = i;
    while (order[hole] != i) {
      tensors[hole] = std::move(tensors[order[hole]]);
      hole = std::exchange(order[hole], hole);
    }
    tensors[hole] = std::move(first);
    order[hole] = hole;
  }
}

// Each tensor begins where the previous one ends and the last ends with the file: no holes, no
// overlap, no two tensors on the same bytes, nothing after the data.
Status HeaderBuilder::check_offsets() {
  std::uint64_t end = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& t : out_.tensors_) {
    if (t.begin != end && !MOESAIC_FAULT(safetensors_skip_offset_check)) {
      current_.name = t.name;
      if (t.begin < end) {
        fail_tensor(StatusCode::kCorruptFile,
                    fmt::format("data_offsets: got [{}, {}], need begin {}: overlaps tensor {}",
                                t.begin, t.end, end, quote_name(previous->name)));
      } else {
        fail_tensor(StatusCode::kCorruptFile,
                    fmt::format("data_offsets: got [{}, {}], need begin {}: a hole of {} bytes",
                                t.begin, t.end, end, t.begin - end));
      }
      return status_;
    }
    end = t.end;
    previous = &t;
  }
  if (end != data_bytes_ && !MOESAIC_FAULT(safetensors_skip_file_size_check)) {
    fail(StatusCode::kCorruptFile,
         fmt::format("incomplete buffer: got {} bytes of data, need {} ({})", data_bytes_, end,
                     data_bytes_ < end ? "the file is truncated" : "trailing bytes"));
    return status_;
  }
  return {};
}

// Sorting by a hash makes most comparisons one integer; equal hashes fall back to the names, so
// crafted collisions cost O(n log n) comparisons, not O(n^2).
Status HeaderBuilder::check_names() {
  const auto& tensors = out_.tensors_;
  auto& keys = out_.by_name_;
  keys.reserve(tensors.size());
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    keys.push_back({std::hash<std::string_view>{}(tensors[i].name), i});
  }
  std::sort(keys.begin(), keys.end(), [&](const auto& a, const auto& b) {
    if (a.hash != b.hash) return a.hash < b.hash;
    return tensors[a.index].name < tensors[b.index].name;
  });
  if (MOESAIC_FAULT(safetensors_compares_all_names)) {  // right, but quadratic
    for (const auto& a : keys) {
      for (const auto& b : keys) {
        if (a.hash == b.hash && a.index < b.index &&
            tensors[a.index].name == tensors[b.index].name) {
          fail(StatusCode::kCorruptFile,
               fmt::format("duplicate key {}", quote_name(tensors[a.index].name)));
        }
      }
    }
  }
  const auto same = std::adjacent_find(keys.begin(), keys.end(), [&](const auto& a, const auto& b) {
    return a.hash == b.hash && tensors[a.index].name == tensors[b.index].name;
  });
  if (same != keys.end() && !MOESAIC_FAULT(safetensors_allow_duplicate_names)) {
    fail(StatusCode::kCorruptFile,
         fmt::format("duplicate key {}", quote_name(tensors[same->index].name)));
  }
  return status_;
}

Result<SafetensorsHeader> HeaderBuilder::finish() {
  sort_by_offset();
  // Names first: a tensor listed twice usually overlaps itself, and the duplicate is the cause.
  MOESAIC_RETURN_IF_ERROR(check_names());
  MOESAIC_RETURN_IF_ERROR(check_offsets());
  return std::move(out_);
}

}  // namespace moesaic::checkpoint
