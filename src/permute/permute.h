// Grouping of tokens by expert, in the three forms that grouped GEMMs want, and the way back. All
// functions write to the caller's buffers and allocate nothing unless they fail.
//   sort_slots.h          the order alone: flat slots by local expert
//   align_block_size.h    padded index lists; rows are gathered by the GEMM itself
//   contiguous_permute.h  rows copied, every expert starting on a tile boundary
//   moe_permute.h         rows copied, no padding
//   unpermute.h           weighted sum of a token's rows, back in token order
#pragma once

#include "permute/align_block_size.h"
#include "permute/contiguous_permute.h"
#include "permute/moe_permute.h"
#include "permute/sort_slots.h"
#include "permute/unpermute.h"
