// Interoperability: what other engines' kernels, transports and loaders want to be given, made here so
// that an engine can use them beside this library. Nothing in Moesaic itself calls these functions;
// each part says who reads its result. All are host functions, deterministic, and report errors as a
// Status; shapes and dtypes stand at each.
//
//   interop/eplb_stepper.h    expert load balancing of all layers of a model as one call in each step:
//                             engines' step loops
//   interop/expert_weights.h  names of expert tensors to parameters and slots (w1/w2/w3, redundant
//                             copies); parameters with one row per slot: engines' weight loops
//   interop/layouts.h         Marlin; W4A8 register order; 128 x 4 block scales (CUTLASS, cuBLAS,
//                             FlashInfer); column-major and packed UE8M0 scales (DeepGEMM)
//   interop/own_layer.h       activation of whole tensors, sizes of a call, registered routing
//                             simulations: engines with a layer of their own
//   interop/parallel.h        masked expert map (AITER), routing tables (DeepEP), padded sizes, chunk
//                             plans, ownership after a change of world size, the step schedule of EPLB
//   interop/permute.h         moe_align_block_size (Triton, Marlin), contiguous rows (DeepGEMM),
//                             moe_permute (CUTLASS), weighted sums back to tokens
//   interop/routing.h         RoutingMethodType (TensorRT-LLM kernels of FlashInfer), the original's
//                             choice of router and of its gate's kernel tier
#pragma once

#include "moesaic/interop/eplb_stepper.h"
#include "moesaic/interop/expert_weights.h"
#include "moesaic/interop/layouts.h"
#include "moesaic/interop/own_layer.h"
#include "moesaic/interop/parallel.h"
#include "moesaic/interop/permute.h"
#include "moesaic/interop/routing.h"
