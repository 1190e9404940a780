// Sizes that parallelism imposes on rows: padded widths, rows per rank, chunks of a common loop.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <new>

#include "core/checked.h"
#include "core/fault.h"
#include "moesaic/interop/parallel.h"

namespace moesaic {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 62;

Status check_size(const char* field, std::int64_t size) {
  if (size < 1) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{}: got {}, need a number >= 1", field, size)};
  }
  if (size > kMostBytes - 512) {
    return {StatusCode::kLimitExceeded, fmt::format("{}: got {}, need below 2^62", field, size)};
  }
  return {};
}

}  // namespace

Result<std::int64_t> round_hidden_size(std::int64_t hidden_size, std::int64_t element_bytes,
                                       HiddenRounding rounding) {
  MOESAIC_RETURN_IF_ERROR(check_size("hidden_size", hidden_size));
  if (rounding > HiddenRounding::kLowLatency) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("rounding: got {}, need one of HiddenRounding", static_cast<int>(rounding)));
  }
  constexpr std::int64_t kRowBytes = 512;
  if (element_bytes < 1 || kRowBytes % element_bytes != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("element_bytes: got {}, need a divisor of 512", element_bytes));
  }
  // Row widths that the low-latency kernels are compiled for.
  constexpr std::array<std::int64_t, 8> kWidths = {2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192};
  switch (rounding) {
    case HiddenRounding::kNone:
      return hidden_size;
    case HiddenRounding::kHighThroughput: {
      const auto bytes = checked_mul(hidden_size, element_bytes);
      if (!bytes || *bytes > kMostBytes - kRowBytes) {
        return Status(StatusCode::kLimitExceeded,
                      fmt::format("hidden_size: got {}, a row exceeds 2^62 bytes", hidden_size));
      }
      if (MOESAIC_FAULT(parallel_round_elements_not_bytes)) {
        return round_up(hidden_size, kRowBytes);
      }
      return round_up(*bytes, kRowBytes) / element_bytes;
    }
    case HiddenRounding::kLowLatency:
      break;
  }
  const auto* width = std::lower_bound(kWidths.begin(), kWidths.end(), hidden_size);
  if (width == kWidths.end()) {
    return Status(StatusCode::kLimitExceeded,
                  fmt::format("hidden_size: got {}, the low-latency transport takes at most {}",
                              hidden_size, kWidths.back()));
  }
  return *width;
}

Result<LayerSizes> round_mxfp4_sizes(const LayerSizes& sizes, Mxfp4Padding padding) {
  MOESAIC_RETURN_IF_ERROR(check_size("hidden_size", sizes.hidden_size));
  MOESAIC_RETURN_IF_ERROR(check_size("intermediate_size", sizes.intermediate_size));
  if (padding > Mxfp4Padding::kOther) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("padding: got {}, need one of Mxfp4Padding", static_cast<int>(padding)));
  }
  std::int64_t hidden = 1;
  std::int64_t intermediate = 64;
  switch (padding) {
    case Mxfp4Padding::kMarlin:
      hidden = 256;
      intermediate = 128;
      break;
    case Mxfp4Padding::kFlashInferTrtllm:
    case Mxfp4Padding::kRocm:
      hidden = intermediate = 256;
      break;
    case Mxfp4Padding::kFlashInferCutlass:
      hidden = intermediate = 128;
      break;
    case Mxfp4Padding::kOther:
      break;
  }
  return LayerSizes{round_up(sizes.hidden_size, hidden),
                    round_up(sizes.intermediate_size, intermediate)};
}

Result<std::vector<std::int64_t>> sequence_parallel_rows(
    std::span<const std::int64_t> tokens_per_dp_rank, int sp_size) {
  if (sp_size < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("sp_size: got {}, need a number >= 1", sp_size));
  }
  std::vector<std::int64_t> rows;
  for (const std::int64_t tokens : tokens_per_dp_rank) {
    if (tokens < 0 || tokens > kMostBytes) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("tokens_per_dp_rank: got {}, need 0 .. 2^62", tokens));
    }
    try {
      rows.insert(rows.end(), static_cast<std::size_t>(sp_size), ceil_div(tokens, sp_size));
    } catch (const std::bad_alloc&) {
      return Status(StatusCode::kOutOfMemory, "sp_size: cannot allocate the rows of all ranks");
    }
  }
  return rows;
}

Result<std::vector<TokenChunk>> plan_chunks(std::int64_t tokens, std::int64_t max_tokens,
                                            std::int64_t chunk_size, bool repeat_last_row) {
  if (chunk_size < 1) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("chunk_size: got {}, need a number >= 1", chunk_size));
  }
  if (max_tokens > kMostBytes) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("max_tokens: got {}, need at most 2^62", max_tokens));
  }
  if (tokens < 0 || tokens > max_tokens) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("tokens: got {}, need 0 .. max_tokens = {}", tokens, max_tokens));
  }
  if (repeat_last_row && tokens == 0 && max_tokens > 0) {
    return Status(StatusCode::kInvalidArgument, "tokens: got 0, there is no last row to repeat");
  }
  // No longer than the loop, whose last step then ends below 2^63.
  chunk_size = std::min(chunk_size, std::max<std::int64_t>(max_tokens, 1));
  std::vector<TokenChunk> chunks;
  try {
    // All at once: what no memory holds is refused here, not after the last of it is taken.
    chunks.reserve(static_cast<std::size_t>(ceil_div(max_tokens, chunk_size)));
    for (std::int64_t first = 0; first < max_tokens; first += chunk_size) {
      TokenChunk c{std::min(first, tokens), 0};
      c.count = std::min(chunk_size, tokens - c.first);
      if (c.count == 0 && repeat_last_row) c = {tokens - 1, 1};
      chunks.push_back(c);
    }
  } catch (const std::exception&) {  // bad_alloc, or length_error for more than any vector has
    return Status(StatusCode::kOutOfMemory, "max_tokens: cannot allocate the chunks");
  }
  return chunks;
}

}  // namespace moesaic
