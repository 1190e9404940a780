// The enumerations that kernels share with the API. By themselves, because device code reads them
// and nothing else of the headers that have their functions: dtype.h, activation.h, spec.h.
#pragma once

#include <cstdint>

namespace moesaic {

// Element types. Names are the safetensors names.
enum class DType : std::uint8_t {
  kBool,
  kF4E2M1,  // two per byte, low nibble first
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,  // OCP
  kF8E4M3,  // OCP e4m3fn: no infinity, NaN = 0x7F and 0xFF
  kF8E8M0,  // power-of-two scale, NaN = 0xFF
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
  // In memory only, no file has them: two per byte, low nibble first.
  kI4,  // two's complement, -8..7
  kU4,  // 0..15, or the index of a table
};

// Arrangement of the gate and up rows of w13 and of the columns of GEMM1's output. Never implied.
enum class GateUpLayout : std::uint8_t { kGateThenUp, kUpThenGate, kInterleaved, kNonGated };

enum class ActivationKind : std::uint8_t {
  kSilu,        // g*sigmoid(g)*u; with limit L: g=min(g,L), u=clamp(u,-L,L) first
  kGelu,        // erf form, times u
  kGeluTanh,    // tanh form, times u
  kSwigluOai,   // (u'+beta) * g'*sigmoid(alpha*g'), g'=min(g,L), u'=clamp(u,-L,L)
  kSwigluStep,  // min(silu(g),L) * clamp(u,-L,L): clamps after silu
  kSitu,        // B*tanh(g/B)*sigmoid(g) * (L2>0 ? L2*tanh(u/L2) : u)
  kSiluNoMul,   // pointwise, not gated
  kGeluNoMul,
  kGeluTanhNoMul,
  kRelu2NoMul,  // max(x,0)^2
};

enum class ScoringFunc : std::uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

enum class RoutingMethod : std::uint8_t {
  kTopK,         // score, (+bias for selection), top-k, optional renormalise, optional scale
  kGroupedTopK,  // the same restricted to the best topk_group of num_expert_group groups
  kTopKSoftmax,  // top-k on logits, softmax over the selected (gpt-oss, Granite)
  kLlama4,       // top-k on logits, sigmoid of the selected; goes with apply_router_weight_on_input
  kSparseMixer,  // Phi-3.5, top_k 2
  kPNorm,        // softmax, top-k, divide by the p-norm of the selected (DBRX)
  kZeroExpert,   // biased top-k over real and identity experts (LongCat)
  kHash,         // ids from a table indexed by token id, weights their scores
  kCustom,       // a caller's function
  kSimulated,    // ignores logits; for load experiments
};

}  // namespace moesaic
