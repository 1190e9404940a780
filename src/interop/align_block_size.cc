// Padded lists of slots by expert.

#include <algorithm>
#include <limits>
#include <string>

#include "core/checked.h"
#include "core/fault.h"
#include "interop/expect.h"
#include "moesaic/interop/permute.h"

namespace moesaic {
namespace {

using interop::expect_length;
using interop::expect_range;
using interop::kMaxInt32;

Status expect_counter(const std::int32_t* num_tokens_post_pad) {
  if (num_tokens_post_pad != nullptr) return {};
  return {StatusCode::kInvalidArgument,
          "num_tokens_post_pad: got a null pointer, need one to a number"};
}

}  // namespace

Result<AlignSizes> moe_align_sizes(std::int64_t num_slots, std::int64_t block_size,
                                   std::int64_t num_experts, bool round_up_to_block) {
  MOESAIC_RETURN_IF_ERROR(expect_range("num_slots", num_slots, 0, kMaxInt32));
  MOESAIC_RETURN_IF_ERROR(expect_range("block_size", block_size, 1, kMaxInt32));
  MOESAIC_RETURN_IF_ERROR(expect_range("num_experts", num_experts, 0, kMaxInt32));
  // All factors are below 2^31: no product or sum here passes 2^63.
  std::int64_t padded = num_slots + num_experts * (block_size - 1);
  if (num_slots < num_experts) padded = std::min(num_slots * block_size, padded);
  if (round_up_to_block) padded = round_up(padded, block_size);
  MOESAIC_RETURN_IF_ERROR(expect_range("sorted_ids length", padded, 0, kMaxInt32));
  return AlignSizes{padded, ceil_div(padded, block_size)};
}

Status moe_align_block_size(std::span<const std::int32_t> topk_ids, std::int64_t block_size,
                            std::int64_t num_experts, std::span<const std::int32_t> expert_map,
                            ExpertMapMode mode, std::span<std::int64_t> scratch,
                            std::span<std::int32_t> sorted_ids, std::span<std::int32_t> expert_ids,
                            std::int32_t* num_tokens_post_pad) {
  const auto n = static_cast<std::int64_t>(topk_ids.size());
  MOESAIC_RETURN_IF_ERROR(expect_counter(num_tokens_post_pad));
  if (mode > ExpertMapMode::kIgnoreInvalid) {
    return {StatusCode::kInvalidArgument,
            "mode: got " + std::to_string(static_cast<int>(mode)) + ", need one of ExpertMapMode"};
  }
  MOESAIC_ASSIGN_OR_RETURN(const AlignSizes sizes, moe_align_sizes(n, block_size, num_experts));
  if (!expert_map.empty()) {
    MOESAIC_RETURN_IF_ERROR(expect_length("expert_map", expert_map.size(), num_experts));
  }
  for (std::size_t e = 0; e < expert_map.size(); ++e) {
    if (expert_map[e] >= -1 && expert_map[e] < num_experts) continue;
    const std::string field = "expert_map[" + std::to_string(e) + "]";
    return expect_range(field.c_str(), expert_map[e], -1, num_experts - 1);
  }
  MOESAIC_RETURN_IF_ERROR(expect_length("scratch", scratch.size(), num_experts));
  MOESAIC_RETURN_IF_ERROR(expect_length("sorted_ids", sorted_ids.size(), sizes.sorted_ids, true));
  const auto length = static_cast<std::int64_t>(sorted_ids.size());
  MOESAIC_RETURN_IF_ERROR(expect_range("sorted_ids length", length, 0, kMaxInt32));
  MOESAIC_RETURN_IF_ERROR(
      expect_length("expert_ids", expert_ids.size(), ceil_div(length, block_size)));

  const bool early = mode == ExpertMapMode::kIgnoreInvalid && !expert_map.empty();
  // The list a slot goes to, or -1.
  const auto list_of = [&](std::int32_t id) -> std::int64_t {
    if (id < 0 || id >= num_experts) return -1;
    return early ? expert_map[static_cast<std::size_t>(id)] : id;
  };

  std::fill(scratch.begin(), scratch.end(), 0);
  for (const std::int32_t id : topk_ids) {
    const std::int64_t e = list_of(id);
    if (e >= 0) ++scratch[static_cast<std::size_t>(e)];
  }
  // Blocks of each expert, one after the other; a count becomes the cursor into sorted_ids.
  std::fill(expert_ids.begin(), expert_ids.end(), -1);
  std::int64_t end = 0;
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const auto at = static_cast<std::size_t>(e);
    const std::int64_t begin = end;
    end += round_up(scratch[at], block_size);
    const bool translate = !early && !expert_map.empty() && !MOESAIC_FAULT(permute_skip_post_map);
    const std::int32_t id = translate ? expert_map[at] : static_cast<std::int32_t>(e);
    for (std::int64_t b = begin; b < end; b += block_size) {
      expert_ids[static_cast<std::size_t>(b / block_size)] = id;
    }
    scratch[at] = begin;
  }
  *num_tokens_post_pad = static_cast<std::int32_t>(end);

  const std::int32_t sentinel =
      MOESAIC_FAULT(permute_zero_sentinel) ? 0 : static_cast<std::int32_t>(n);
  std::fill(sorted_ids.begin(), sorted_ids.end(), sentinel);
  for (std::int64_t s = 0; s < n; ++s) {
    const std::int64_t e = list_of(topk_ids[static_cast<std::size_t>(s)]);
    if (e < 0) continue;
    std::int64_t& cursor = scratch[static_cast<std::size_t>(e)];
    sorted_ids[static_cast<std::size_t>(cursor++)] = static_cast<std::int32_t>(s);
  }
  return {};
}

Status moe_align_block_size_batched(std::span<const std::int32_t> expert_num_tokens,
                                    std::int64_t max_tokens, std::int64_t block_size,
                                    std::span<std::int32_t> sorted_ids,
                                    std::span<std::int32_t> block_ids,
                                    std::int32_t* num_tokens_post_pad) {
  const auto experts = static_cast<std::int64_t>(expert_num_tokens.size());
  MOESAIC_RETURN_IF_ERROR(expect_counter(num_tokens_post_pad));
  MOESAIC_RETURN_IF_ERROR(expect_range("number of experts", experts, 0, kMaxInt32));
  MOESAIC_RETURN_IF_ERROR(expect_range("max_tokens", max_tokens, 0, kMaxInt32));
  MOESAIC_RETURN_IF_ERROR(expect_range("block_size", block_size, 1, kMaxInt32));
  const std::int64_t blocks = ceil_div(max_tokens, block_size);
  // blocks * block_size < 2^32 and experts < 2^31: the product fits.
  MOESAIC_RETURN_IF_ERROR(
      expect_range("sorted_ids length", experts * (blocks * block_size), 0, kMaxInt32));
  MOESAIC_RETURN_IF_ERROR(
      expect_length("sorted_ids", sorted_ids.size(), experts * blocks * block_size));
  MOESAIC_RETURN_IF_ERROR(expect_length("block_ids", block_ids.size(), experts * blocks));
  for (std::size_t e = 0; e < expert_num_tokens.size(); ++e) {
    const std::int64_t count = expert_num_tokens[e];
    if (count >= 0 && count <= max_tokens) continue;
    return Status(StatusCode::kInvalidArgument, "expert_num_tokens[" + std::to_string(e) +
                                                    "]: got " + std::to_string(count) +
                                                    ", need 0 .. " + std::to_string(max_tokens));
  }

  std::fill(sorted_ids.begin(), sorted_ids.end(), static_cast<std::int32_t>(experts * max_tokens));
  std::fill(block_ids.begin(), block_ids.end(), -1);
  std::int64_t end = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    const std::int64_t count = expert_num_tokens[static_cast<std::size_t>(e)];
    for (std::int64_t i = 0; i < count; ++i) {
      sorted_ids[static_cast<std::size_t>(end + i)] = static_cast<std::int32_t>(e * max_tokens + i);
    }
    for (std::int64_t b = 0; b < ceil_div(count, block_size); ++b) {
      block_ids[static_cast<std::size_t>(end / block_size + b)] = static_cast<std::int32_t>(e);
    }
    end += round_up(count, block_size);
  }
  *num_tokens_post_pad = static_cast<std::int32_t>(end);
  return {};
}

}  // namespace moesaic
