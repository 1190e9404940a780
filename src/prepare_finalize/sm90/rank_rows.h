// Device kernels of the transports between ranks: which rows go where, rows into messages and out
// of them, and the sums of what comes back. Launches return a cudaError_t value and are capturable.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moesaic/dtype.h"

namespace moesaic::cuda {

// For each rank the tokens that have an expert there, in ascending order.
struct SendPlanParams {
  const std::int32_t* ids = nullptr;    // [tokens, top_k]; -1: no expert
  const std::int32_t* owner = nullptr;  // [num_experts] rank
  std::int32_t num_experts = 0;
  std::int32_t ranks = 0;
  std::int32_t top_k = 0;
  std::int32_t tokens = 0;
  std::int32_t capacity = 0;            // row length of `index`
  std::int32_t* index = nullptr;        // [ranks, capacity] out: tokens
  std::int32_t* position = nullptr;     // [tokens, ranks] out: place among the rank's rows, or -1
  std::int32_t* counts = nullptr;       // [ranks] out
  std::int32_t* host_counts = nullptr;  // [ranks] out, pinned host memory
};
int launch_send_plan(const SendPlanParams& params, void* stream);

// A row in a message: hidden_bytes of elements, `groups` scales, top_k ids, top_k weights, padded
// to a multiple of 16 bytes.
struct MessageRow {
  std::int64_t hidden_bytes = 0;  // a multiple of 16
  std::int32_t groups = 0;        // 0: not quantised
  std::int32_t top_k = 0;
  std::int64_t bytes() const { return (hidden_bytes + 4LL * groups + 8LL * top_k + 15) / 16 * 16; }
};
// The same apart: scales lie [groups][scale_stride].
struct RowArrays {
  std::byte* hidden = nullptr;
  float* scale = nullptr;
  std::int64_t scale_stride = 0;
  std::int32_t* ids = nullptr;
  float* weights = nullptr;
};
// Message row i is row index[i] (null: i) of the arrays.
int launch_pack_rows(const MessageRow& row, const RowArrays& from, const std::int32_t* index,
                     std::int64_t count, std::byte* to, void* stream);
// Row first + i of the arrays is message row i.
int launch_unpack_rows(const MessageRow& row, const std::byte* from, std::int64_t count,
                       const RowArrays& to, std::int64_t first, void* stream);

// What came back for each token: `position` and `counts` as planned, the ranks' answers one after
// the other. position null: every rank answers all tokens.
struct AnswerParams {
  const void* answers = nullptr;
  bool bf16 = false;
  const std::int32_t* position = nullptr;
  const std::int32_t* counts = nullptr;
  std::int32_t ranks = 0;
  std::int32_t hidden = 0;  // a multiple of 4
  std::int64_t tokens = 0;
  void* sum = nullptr;        // [tokens, hidden], 16-byte aligned
  DType dtype = DType::kF32;  // of it: F32, BF16 or F16; fp32 sums are rounded once
  // Slots: an answer is top_k rows, of which those count whose expert the rank owns.
  const std::int32_t* ids = nullptr;    // [tokens, top_k]
  const std::int32_t* owner = nullptr;  // [num_experts]
  std::int32_t top_k = 0, num_experts = 0;
  const float* weights =
      nullptr;  // [tokens, top_k] that the rows lack, or null: products are rounded
};
// sum = the ranks' partial sums in rank order, in fp32.
int launch_sum_answers(const AnswerParams& params, void* stream);
// sum = the slots' rows in slot order, in fp32.
int launch_sum_slots(const AnswerParams& params, void* stream);

// sum[i] = part 0 + part 1 + .. of [parts, count] values, fp32 or bf16 (summed in fp32, rounded).
int launch_sum_in_order(const void* parts, int num_parts, std::int64_t count, bool bf16, void* sum,
                        void* stream);

// ids of slots with weight zero become -1: identity experts, for which no row need travel.
int launch_drop_weightless(const std::int32_t* ids, const float* weights, std::int64_t count,
                           std::int32_t* to, void* stream);

}  // namespace moesaic::cuda
