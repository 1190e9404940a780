// The two grouped GEMMs of the experts stage on a Hopper GPU, as one persistent kernel: parameters,
// sizes and the choice of a build. Host-visible, free of CUDA types. What is computed:
// experts/reference/experts.h; number formats: format_parts.h and formats.h; layouts of the
// repacked weights: repack.h; the work list: permute/sm90/align.h.
//
// Words used throughout:
//   pair    a token and one of its slots: one row of an expert's work
//   record  entry of the work list: an expert and its rows, or a part of them
//   group   at most max_columns rows of one expert that are computed together
//   band    256 weight rows of a matrix; of w13 with a gate: gate and up rows of 128 channels
//   slab    half of a band: the 128 rows that one consumer warpgroup multiplies
//   chunk   128 bytes of a token row, and the same part of K of a band
//   stage   a place of the ring in shared memory: a chunk of a band and of a group's rows, or two of
//           weights that are decoded
//   item    a band and a group: what a CTA takes from the list at a time
//
// Both GEMMs have the weights as the M operand of wgmma and the tokens as the N operand, except
// full groups. The kernel takes first all items of GEMM1 and then all of GEMM2 from one counter. An
// item of GEMM2 waits, in the warps that gather its rows only, for GEMM1's items of the same group;
// its weights stream in meanwhile. So one launch keeps memory busy from the first weight to the
// last.
//
// Determinism: a row's bits depend on that row and the weights only. K is reduced in ascending
// chunks by one accumulator chain whatever the group size.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/device_traits.h"
#include "cuda/quant_rows.h"
#include "moesaic/kinds.h"
#include "permute/sm90/align.h"
#include "permute/sm90/combine.h"
#include "router/sm90/route.h"

namespace moesaic {
struct ActivationSpec;
}

namespace moesaic::cuda {

// Builds of at most so many tokens per item halve a band between two CTAs: few items are then twice
// as many multiprocessors, each of which takes in about 50 GB/s.
inline constexpr int kSplitColumns = 16;

// How the activation of GEMM1's result is computed.
enum class EpilogueKind : std::uint8_t {
  // (clamp(u) + beta) * g * sigmoid(a g + b g^3), g limited from above: silu, swigluoai, swiglustep and
  // gelu_tanh
  kSwiglu,
  kGeneral,  // any other gated kind
  kRelu2,    // relu2_no_mul, in formats that have builds for it
  kPlain,    // not gated
};

// Up to kListPairs pairs a warp makes the work list, a lane per pair, in builds of at most
// kListColumns columns.
inline constexpr int kListPairs = 32, kListColumns = 32;
// What the kernel may route itself: kTopK and kGroupedTopK, up to kRouteTokens tokens and
// kRouteColumns columns of logits, and at most 32 groups and slots.
inline constexpr int kRouteTokens = 4, kRouteColumns = 512;

// Weights of all local experts, one after the other. What the images and arrays of scales hold is
// the format's (formats.h); biases [expert][rows] or null.
struct GroupedWeights {
  const std::byte* w13 = nullptr;
  const std::byte* w2 = nullptr;
  const float* w13_scale = nullptr;
  const float* w2_scale = nullptr;
  const float* w13_bias = nullptr;
  const float* w2_bias = nullptr;
};

struct GroupedRows {
  // Operand rows of GEMM1 (one per token) and their scales [chunk][x_scale_stride].
  const std::byte* x = nullptr;
  const float* x_scale = nullptr;
  std::int64_t x_scale_stride = 0;
  // Operand rows of GEMM2 (one per row of the work list), written by GEMM1.
  std::byte* inner = nullptr;
  float* inner_scale = nullptr;
  std::int64_t inner_scale_stride = 0;
  // [pairs][hidden] bf16 (F32 where row_has_wide_result), or as place_of_row says
  void* y2 = nullptr;
};

struct GroupedList {
  const GroupRecord* groups = nullptr;
  const std::int32_t* pair_of_row = nullptr;
  const float* weight_of_row = nullptr;  // null: factor 1
  std::uint32_t* next_item = nullptr;    // zero at launch
  const std::uint32_t* num_groups = nullptr;
  std::uint32_t* group_done = nullptr;  // [groups], zero at launch
};

// What a work list is made of; see AlignParams.
struct ListSource {
  const std::int32_t* topk_ids = nullptr;
  const float* topk_weights = nullptr;
  const std::int32_t* expert_map = nullptr;
  std::int32_t num_experts = 0, num_local_experts = 0;
};

// Up to kListPairs pairs: every CTA makes the list itself, in shared memory. Of GroupedList only
// next_item and group_done are used, and combine.row_of_pair is not. Builds of at most
// kListColumns.
struct OwnList {
  std::int32_t pairs = 0;  // at most kListPairs; 0: the list is in memory
  ListSource source;
  // The kernel routes as well (SwiGLU): ids and weights of the source are those that it makes from
  // route.logits, and written to memory too.
  bool routes = false;
  RouteParams route;
};

// Bands of w13 from `weights` on whose first chunks will be read whatever the routing: brought into
// L2 before the kernels in front have ended.
struct AheadWeights {
  const std::byte* weights = nullptr;
  std::int32_t bands = 0, chunks = 0;
};

struct GroupedActivation {
  int kind = 0;  // ActivationKind, for kGeneral and kPlain
  float limit = 0, alpha = 1, beta = 0, up_limit = 0;
  // Of kSwiglu: sigmoid's argument is -(slope g + cubic g^3), in powers of two, and the limit of g.
  float slope = 0, cubic = 0, most_gate = 0;
};
// With the constants of kSwiglu, where that is its epilogue.
GroupedActivation grouped_activation(const ActivationSpec& activation);

// Formats with one scale per operand row.
struct WholeRows {
  // Static scales [local experts] of both GEMMs' rows, or null: each row has its own, x_scale
  // [tokens] and inner_scale [rows of the work list]. NVFP4 has inner_static beside the scales of
  // groups.
  const float* x_static = nullptr;
  const float* inner_static = nullptr;
  // Without static scales: GEMM1's result [rows of the work list, intermediate] in bf16 and the
  // bits of each row's largest magnitude, zero at launch.
  std::byte* inner_bf16 = nullptr;
  std::uint32_t* inner_amax = nullptr;
};

// What a thread needs to read images whose strips vary (weight_codes.h).
struct CodeImage {
  std::int32_t slab_bytes = 0;  // of a chunk: codes, then the strip
  std::int32_t units = 0;       // scales per row and chunk: 1, 2 or 4
  // Where the strip has what is left of scales (or the numbers that they are multiples of), zero points,
  // and what these leave of minima, from the slab's begin; 0: nowhere.
  std::int32_t low_at = 0, zero_at = 0, offset_at = 0;
  std::uint32_t addend = 0;  // bf16 pair, of integers without stored zero points: codes_integer.h
  std::uint32_t table[8] = {};  // of DecodeTable: codes_table.h
};

struct GroupedParams {
  GroupedWeights weights;
  GroupedRows rows;
  GroupedList list;
  OwnList own_list;
  AheadWeights ahead;
  // Sizes: not a struct of their own, whose alignment would cost the kernel loads.
  std::int32_t top_k = 1;
  std::int32_t hidden = 0, intermediate = 0;  // elements
  std::int32_t bands1 = 0, bands2 = 0;
  std::int32_t slabs1 = 0, slabs2 = 0;  // real slabs; the last band may have one
  std::int32_t chunks1 = 0, chunks2 = 0;
  std::int32_t row_bytes1 = 0, row_bytes2 = 0;  // of one operand row
  // Up to kFoldCombineTokens tokens: the CTA that finishes the last item of a band sums its columns
  // for all tokens, which saves a kernel. The order of arrival does not enter the sums.
  bool fold_combine = false;
  CombineParams combine;
  std::uint32_t* band_done = nullptr;  // [2 bands2], zero at launch
  bool power_of_two_scales = false;    // of GEMM1's result, where it is quantised
  GroupedActivation activation;
  WholeRows whole;
  CodeImage codes, codes2;  // of w13 and w2
  // Formats that can: GEMM1's result is quantised to values of this form; kBf16: not.
  RowForm inner_values = RowForm::kBf16;
  // Formats whose sums have scales: chunks that have one together, 1 or 2 of them.
  std::uint8_t chunks_of_sums = 1;
  // The row of y2 for a row of the work list: list.pair_of_row, or 0, 1, 2 .. (no own list, no
  // fold_combine).
  const std::int32_t* place_of_row = nullptr;
};

// Set in group_done when a group's rows of the intermediate have been quantised (whole rows).
inline constexpr std::uint32_t kGroupQuantised = 1U << 24;

// Which build of the kernel: a pure function of the problem, the number of tokens and the device.
struct GroupedVariant {
  EpilogueKind epilogue = EpilogueKind::kSwiglu;
  int max_columns = 64;  // tokens per item: 16 (bands are halved), 32, 48, 64 or more: TileRules
  bool paired = false;   // two CTAs work on two groups of one band and share its weights
};

// How a format's builds are chosen.
struct TileRules {
  // One token: bands are halved while each pair of CTAs gets at most so many items of GEMM1.
  int split_items = 1;
  // From so many rows per expert on pairs of CTAs share weights; 0: never.
  int paired_rows = 0;
  int widest = 128;  // columns: 128, 136, 144 or 160
  // Columns of a build for experts of somewhat more rows than 128, which would be two groups: 136,
  // 144 or 0, none.
  int snug = 0;
  // Groups have 32 columns up to so many rows per expert, and `middle` of them (64 or 48) up to 32.
  int narrow_rows = 8;
  int middle = 64;
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
GroupedVariant choose_grouped(const TileRules& rules, EpilogueKind epilogue, std::int64_t tokens,
                              std::int64_t top_k, std::int64_t experts, std::int64_t bands,
                              const DeviceTraits& device);

// Launches one build on `stream` (a cudaStream_t) with one CTA per multiprocessor, after the
// kernels before it (programmatic dependent launch). Returns a cudaError_t value, 0 for success;
// cudaErrorInvalidConfiguration for a tile that the build does not have.
using LaunchGrouped = int(const GroupedVariant& variant, const GroupedParams& params, int num_sms,
                          void* stream);

}  // namespace moesaic::cuda
