// The number formats that the grouped-GEMM kernel computes, as a table: what the host needs to know
// of each. A format is added with a policy (formats/), a row in format_rows_*.cc and its builds in
// CMakeLists.txt.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "cuda/quant_rows.h"
#include "experts/sm90/grouped_gemm.h"
#include "experts/sm90/repack.h"
#include "moesaic/experts.h"
#include "moesaic/status.h"
#include "quant/compute_scheme.h"

namespace moesaic::cuda {

struct ExpertsPlan;
struct RepackCall;

// Where the weights of all local experts are: what the kernel reads, and static scales of rows
// [experts].
struct PlacedWeights : GroupedWeights {
  const float* w13_input_scale = nullptr;
  const float* w2_input_scale = nullptr;
  const std::int32_t* w13_perm = nullptr;  // [experts][hidden], where columns have their own order
};

// One array of repacked weights on the device.
struct WeightPart {
  std::string_view name;  // as a refusal for want of memory says it
  void (*bind)(PlacedWeights& weights, const std::byte* at);
  std::int64_t (*bytes)(const ExpertsPlan& plan);  // of one expert
};

// What launches a format's builds. Null without CUDA.
struct GroupedUnits {
  LaunchGrouped* swiglu = nullptr;
  LaunchGrouped* relu2 = nullptr;  // of formats that have it
  LaunchGrouped* any = nullptr;    // with any other epilogue
};

struct FormatRow {
  ComputeScheme scheme;
  // Where a scheme has more formats than one: which weights are this one's, and what texts call it.
  bool (*takes)(const OperandQuant& weight);  // null: all
  // Where w2 has a form of its own (Scheme::forms, of which `takes` is asked about w13's): which.
  bool (*takes_w2)(const OperandQuant& weight);
  std::string_view name;
  RowForm rows;    // operand rows of both GEMMs
  int chunk_k;     // elements of K in a chunk
  int slab_bytes;  // of a chunk, in the image; at most, where `image` says
  // How the image is to be read, where a format has several kinds of codes. exact_scales: all
  // scales are bf16 numbers. Null: there is nothing to say.
  CodeImage (*image)(const OperandQuant& weight, bool exact_scales);
  // Intermediate sizes are padded with zeros to whole multiples when an expert is loaded.
  int inner_multiple;
  TileRules tiles;
  std::span<const WeightPart> parts;
  // What this format cannot do of a problem that the kernel can in general. kUnsupported.
  Status (*check)(const MoeProblem& problem);
  // Brings one expert's checked weights into its place in each of the parts. Null without CUDA.
  Status (*repack)(const RepackCall& call);
  // Builds for kRelu2; for kGeneral and kPlain; for swiglustep among those for kSwiglu.
  bool has_relu2, has_any, has_step;
  GroupedUnits units;
};

// All of them, in two parts.
std::array<std::span<const FormatRow>, 2> grouped_formats();
// The epilogue of `kind` in this format; kUnsupported where it has no builds for that.
EpilogueKind epilogue_of(const FormatRow& row, ActivationKind kind);
Status check_activation(const FormatRow& row, const MoeProblem& problem);
// What launches the variant's build.
LaunchGrouped* launcher_of(const FormatRow& row, const GroupedVariant& variant);
// The row of the problem's scheme. kUnsupported: a scheme without one, or none.
Result<const FormatRow*> format_of(const MoeProblem& problem);
// The problem as its format computes it: with the intermediate size padded.
Result<MoeProblem> fitted_problem(const MoeProblem& problem);
// Schemes of the rows that `has`, for texts: "bf16 or fp8-block".
std::string names_of_formats(bool (*has)(const FormatRow& row) = nullptr);

}  // namespace moesaic::cuda
