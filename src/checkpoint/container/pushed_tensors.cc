#include "checkpoint/container/pushed_tensors.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "checkpoint/container/names.h"
#include "core/checked.h"
#include "core/fault.h"

namespace moesaic::checkpoint {
namespace {

// Do the runs lie in a tensor of so many bytes? Their total is then no more than that.
bool runs_fit(const ByteRuns& runs, std::int64_t bytes) {
  if (runs.first < 0 || runs.bytes < 0 || runs.count < 0 || runs.pitch < runs.bytes) return false;
  if (runs.count == 0) return true;
  const auto last = checked_mul(runs.count - 1, runs.pitch);
  const auto begin = last ? checked_add(*last, runs.first) : std::nullopt;
  const auto end = begin ? checked_add(*begin, runs.bytes) : std::nullopt;
  return end && *end <= bytes;
}

Status internal(const TensorInfo& info, std::string_view text) {
  return {StatusCode::kInternal, fmt::format("{}: {}", quote_name(info.name), text)};
}

}  // namespace

Result<const TensorInfo*> PushedTensors::add(std::string_view name, DType dtype, const Shape& shape,
                                             quant::GgufType block_type) {
  if (name.empty()) return Status(StatusCode::kInvalidArgument, "name: got none, need a tensor's");
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(dtype, shape));
  const auto [at, is_new] = entries_.try_emplace(std::string(name));
  if (!is_new) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("{}: pushed twice, need it once", quote_name(name)));
  }
  Entry& entry = at->second;
  entry.info.name = at->first;
  entry.info.dtype = dtype;
  entry.info.rank = shape.rank();
  entry.info.shape = shape;
  entry.info.end = static_cast<std::uint64_t>(bytes);
  entry.info.block_type = block_type;
  by_info_[&entry.info] = &entry;
  return &entry.info;
}

void PushedTensors::drop(Entry* entry) {
  for (const Piece& piece : entry->pieces) kept_bytes_ -= piece.bytes.bytes();
  entry->pieces.clear();
}

Status PushedTensors::keep(const TensorInfo& info, std::span<const ByteRuns> runs,
                           const std::byte* tensor) {
  Entry& entry = *by_info_.at(&info);
  std::vector<Piece> pieces;
  for (const ByteRuns& run : runs) {
    if (!runs_fit(run, static_cast<std::int64_t>(info.bytes()))) {
      return internal(info, "a part of it that is kept lies outside");
    }
    if (run.bytes == 0 || run.count == 0) continue;
    Piece piece{run, {}};
    MOESAIC_ASSIGN_OR_RETURN(piece.bytes,
                             Tensor::uninitialized(DType::kU8, {run.count * run.bytes}));
    for (std::int64_t i = 0; i < run.count; ++i) {
      const std::int64_t row = MOESAIC_FAULT(pushed_runs_side_by_side) ? run.bytes : run.pitch;
      std::memcpy(piece.bytes.data() + i * run.bytes, tensor + run.first + i * row,
                  static_cast<std::size_t>(run.bytes));
    }
    pieces.push_back(std::move(piece));
  }
  drop(&entry);
  entry.pieces = std::move(pieces);
  for (const Piece& piece : entry.pieces) kept_bytes_ += piece.bytes.bytes();
  return {};
}

Status PushedTensors::cut(const TensorInfo& info, std::span<const ByteRuns> runs) {
  if (!keeps_whole(info)) return internal(info, "cannot be cut, need the whole of it");
  Entry& entry = *by_info_.at(&info);
  if (entry.pieces.empty()) return {};
  if (MOESAIC_FAULT(pushed_cut_forgets_first)) {
    const Piece whole = std::move(entry.pieces.front());
    entry.pieces.clear();
    return keep(info, runs, whole.bytes.data());
  }
  // The whole goes when all parts of it are there.
  return keep(info, runs, entry.pieces.front().bytes.data());
}

void PushedTensors::forget(const TensorInfo& info) {
  const auto at = by_info_.find(&info);
  if (at == by_info_.end()) return;
  drop(at->second);
  by_info_.erase(at);
  const auto entry = entries_.find(info.name);
  entries_.erase(entry);
}

const TensorInfo* PushedTensors::find(std::string_view name) const {
  const auto at = entries_.find(name);
  return at == entries_.end() ? nullptr : &at->second.info;
}

bool PushedTensors::keeps_whole(const TensorInfo& info) const {
  if (info.bytes() == 0) return true;
  const std::vector<Piece>& pieces = by_info_.at(&info)->pieces;
  return pieces.size() == 1 && pieces.front().runs == whole_tensor(info);
}

std::vector<const TensorInfo*> PushedTensors::tensors() const {
  std::vector<const TensorInfo*> all;
  all.reserve(entries_.size());
  for (const auto& [name, entry] : entries_) all.push_back(&entry.info);
  return all;
}

Status PushedTensors::read_range(const TensorInfo& info, std::uint64_t offset,
                                 std::span<std::byte> dst) const {
  if (dst.empty()) return {};
  const auto begin = static_cast<std::int64_t>(offset);
  const auto bytes = static_cast<std::int64_t>(dst.size());
  for (const Piece& piece : by_info_.at(&info)->pieces) {
    const ByteRuns& runs = piece.runs;
    if (begin < runs.first) continue;
    const std::int64_t run = (begin - runs.first) / runs.pitch;
    const std::int64_t inside = (begin - runs.first) % runs.pitch;
    if (run >= runs.count || inside > runs.bytes || bytes > runs.bytes - inside) continue;
    std::memcpy(dst.data(), piece.bytes.data() + run * runs.bytes + inside, dst.size());
    return {};
  }
  return internal(info, fmt::format("{} bytes at {} were not kept", bytes, begin));
}

}  // namespace moesaic::checkpoint
