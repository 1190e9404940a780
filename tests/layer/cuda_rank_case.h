// Layers spread over GPUs, and which ways of spreading a GPU takes.
#pragma once

#include <string>
#include <vector>

#include "layer/layer_specs.h"
#include "layer/rank_case.h"

namespace moesaic::test {

// DeepSeek-V3, Llama 4 (both also in FP8 blocks), biases with a scaled output, identity experts, and
// hidden sizes that are no multiple of 8, or of 128 in FP8 blocks, and F16 and F32.
std::vector<Feature> rank_features();

// Solved on one GPU, in steps of a few rows: some ranks have none in some of them.
RankProblem gpu_problem(const LayerTensors& tensors, std::int64_t tokens);

// What a GPU takes (the rest is refused by name, cuda_plan_test.cc).
bool runs_on_gpus(const RankCombo& combo, const MoeLayerSpec& spec);

// Relative L2. Slices of an expert are rounded to bf16 before they are added; else only the order
// of fp32 sums differs.
double bound_on_gpus(const RankCombo& combo);

// A rank of two engines with whole experts, on the first GPU.
FusedMoE::Options two_engines(int rank, const std::shared_ptr<Communicator>& communicator);

std::vector<int> usable_devices();

}  // namespace moesaic::test
