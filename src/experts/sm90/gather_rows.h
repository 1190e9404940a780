// Operand rows of GEMM1 for weights whose columns are in an order of their own (act-order): every
// expert has another, so a row is made for each pair.
#pragma once

#include <cstdint>

namespace moesaic::cuda {

struct GatherRowsParams {
  const std::uint16_t* x = nullptr;          // [tokens, columns] bf16
  std::uint16_t* rows = nullptr;             // [tokens * top_k, columns], 16-byte aligned
  const std::int32_t* perm = nullptr;        // [local experts, columns]
  const std::int32_t* topk_ids = nullptr;    // [tokens * top_k]
  const std::int32_t* expert_map = nullptr;  // [num_experts] or null: identity
  // Instead of ids: pair p is row p % slab_rows of expert p / slab_rows, if that counts
  // ([num_local_experts]); null: ids.
  const std::int32_t* slab_counts = nullptr;
  std::int32_t slab_rows = 1;
  std::int64_t pairs = 0, columns = 0;  // columns a multiple of 8
  std::int32_t top_k = 1, num_experts = 0, num_local_experts = 0;
};

// rows[pair][k] = x[pair / top_k][perm[expert][k]]; pairs without a local expert get no row.
// Returns a cudaError_t value.
int launch_gather_rows(const GatherRowsParams& params, void* stream);

}  // namespace moesaic::cuda
