// The two grouped GEMMs of the experts stage on a Hopper GPU, as one persistent kernel: parameters,
// sizes and launchers. Host-visible, free of CUDA types. What is computed:
// experts/reference/experts.h; layouts of the repacked weights: repack.h; the work list:
// permute/sm90/align.h.
//
// Both GEMMs have the weights as the M operand of wgmma and the tokens as the N operand. A work
// item is (expert, band of 256 weight rows, group of at most max_columns tokens of the expert); the
// kernel takes first all items of GEMM1 and then all of GEMM2 from one counter. An item of GEMM2
// waits, in the warps that gather its tokens only, for GEMM1's items of the same group; its weights
// stream in meanwhile. So one launch keeps memory busy from the first weight to the last.
//
// Determinism: a row's bits depend on that row and the weights only. K is reduced in ascending
// chunks of 128 bytes by one accumulator chain whatever the group size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "permute/sm90/align.h"
#include "permute/sm90/combine.h"
#include "router/sm90/route.h"

namespace moesaic::cuda {

// Geometry shared with the repacking and the work list.
inline constexpr int kBandRows = 256;                   // weight rows of one item
inline constexpr int kChunkBytes = 128;                 // K bytes of one pipeline stage
inline constexpr int kSlabBytes = 128 * kChunkBytes;    // 128 rows of a chunk: one consumer group
inline constexpr int kBandImageBytes = 2 * kSlabBytes;  // one stage of weights
// Builds of at most so many tokens per item halve a band between two CTAs: few items are then twice
// as many multiprocessors, each of which takes in about 50 GB/s.
inline constexpr int kSplitColumns = 16;

enum class GroupedFormat : std::uint8_t { kFp8Block, kBf16 };

// How the activation of GEMM1's result is computed.
enum class EpilogueKind : std::uint8_t {
  kSwiglu,   // (clamp(u) + beta) * g * sigmoid(alpha * g), g limited from above: silu and swigluoai
  kGeneral,  // any other gated kind
  kPlain,    // not gated
};

// Up to so many pairs a warp makes the work list, a lane per pair, in builds of so many columns.
inline constexpr int kListPairs = 32, kListColumns = 32;
// What a work list is made of; see AlignParams.
struct ListSource {
  const std::int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  const std::int32_t* expert_map = nullptr;
  std::int32_t num_experts = 0, num_local_experts = 0;
};

// What the kernel may route itself: kTopK and kGroupedTopK of so many tokens, columns of logits,
// and at most 32 groups and slots.
inline constexpr int kRouteTokens = 4, kRouteColumns = 384;

struct GroupedParams {
  // Repacked weights; scales [expert][band][chunk] of four floats; biases [expert][rows] or null.
  const std::byte* w13 = nullptr;
  const std::byte* w2 = nullptr;
  const float* w13_scale = nullptr;
  const float* w2_scale = nullptr;
  const float* w13_bias = nullptr;
  const float* w2_bias = nullptr;
  // Operand rows of GEMM1 (one per token) and their scales [chunk][x_scale_stride].
  const std::byte* x = nullptr;
  const float* x_scale = nullptr;
  std::int64_t x_scale_stride = 0;
  // Operand rows of GEMM2 (one per row of the work list), written by GEMM1.
  std::byte* inner = nullptr;
  float* inner_scale = nullptr;
  std::int64_t inner_scale_stride = 0;
  std::uint16_t* y2 = nullptr;  // [pairs][hidden] bf16
  // Work list.
  const GroupRecord* groups = nullptr;
  const std::int32_t* pair_of_row = nullptr;
  const float* weight_of_row = nullptr;  // null: factor 1
  std::uint32_t* next_item = nullptr;    // zero at launch
  const std::uint32_t* num_groups = nullptr;
  std::uint32_t* group_done = nullptr;  // [groups], zero at launch
  // Few pairs: every CTA makes the list itself, in shared memory, and the list above (except
  // next_item and group_done) and combine.row_of_pair are not read. Builds of at most
  // kListColumns, list_pairs at most kListPairs; 0: the list is in memory.
  std::int32_t list_pairs = 0;
  ListSource list_source;
  // The kernel routes as well (list_pairs > 0, SwiGLU): ids and weights of the source are those
  // that it makes from route.logits, and written to memory too.
  bool routes = false;
  RouteParams route;
  // Bands of w13 from `ahead` on whose first chunks will be read whatever the routing: brought into
  // L2 before the kernels in front have ended.
  const std::byte* ahead = nullptr;
  std::int32_t ahead_bands = 0, ahead_chunks = 0;
  std::int32_t top_k = 1;
  std::int32_t hidden = 0, intermediate = 0;  // elements
  std::int32_t bands1 = 0, bands2 = 0;
  std::int32_t slabs1 = 0, slabs2 = 0;  // real slabs of 128 rows; the last band may have one
  std::int32_t chunks1 = 0, chunks2 = 0;
  std::int32_t row_bytes1 = 0, row_bytes2 = 0;  // of one operand row
  // Few tokens: whoever finishes the last item of a band sums its columns for all tokens, which
  // saves a kernel. Arrival order does not enter the sums.
  bool fold_combine = false;
  CombineParams combine;
  std::uint32_t* band_done = nullptr;  // [2 bands2], zero at launch
  bool power_of_two_scales = false;
  int activation_kind = 0;  // ActivationKind, for kGeneral and kPlain
  float limit = 0, alpha = 1, beta = 0, up_limit = 0;
};

// Which build of the kernel: a pure function of the problem and the number of tokens.
struct GroupedVariant {
  GroupedFormat format = GroupedFormat::kFp8Block;
  EpilogueKind epilogue = EpilogueKind::kSwiglu;
  int max_columns = 64;  // 16, 32, 64 or 128 tokens per item; 16: bands are halved
  bool paired = false;   // bf16: two CTAs work on two groups of one band and share its weights
};

// Up to this many tokens the GEMM kernel combines as well: a band's sum is then shorter than a
// launch.
inline constexpr std::int64_t kFoldCombineTokens = 16;

// Rows that one record of the work list covers.
constexpr std::int32_t rows_per_record(const GroupedVariant& v) {
  return v.max_columns * (v.paired ? 2 : 1);
}

// The build for `tokens` tokens of `top_k` experts each out of `experts` with `bands` bands of w13:
// wider groups where experts have more rows. Every choice gives the same bits.
GroupedVariant choose_grouped(GroupedFormat format, EpilogueKind epilogue, std::int64_t tokens,
                              std::int64_t top_k, std::int64_t experts, std::int64_t bands);

// Launches on `stream` (a cudaStream_t) with one CTA per multiprocessor, after the kernels before
// it (programmatic dependent launch). Returns a cudaError_t value, 0 for success.
int launch_grouped(const GroupedVariant& variant, const GroupedParams& params, int num_sms,
                   void* stream);
// The same, one translation unit per format and epilogue family.
int launch_grouped_fp8(const GroupedVariant& variant, const GroupedParams& params, int num_sms,
                       void* stream);
int launch_grouped_bf16(const GroupedVariant& variant, const GroupedParams& params, int num_sms,
                        void* stream);
int launch_grouped_fp8_other(const GroupedVariant& variant, const GroupedParams& params,
                             int num_sms, void* stream);
int launch_grouped_bf16_other(const GroupedVariant& variant, const GroupedParams& params,
                              int num_sms, void* stream);

}  // namespace moesaic::cuda
