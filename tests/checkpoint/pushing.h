// Handing the tensors of a checkpoint to a WeightLoader, and comparing what comes out with what the
// files give.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/container/shards.h"
#include "moesaic/checkpoint.h"
#include "moesaic/weight_loader.h"

namespace moesaic::test {

// Every tensor of a folder or GGUF file, in memory.
struct StoredTensor {
  std::string name;
  Tensor tensor;
  std::uint32_t ggml_type = 0;  // of blocks
  bool blocks = false;
};
std::vector<StoredTensor> read_all_tensors(const std::string& path);

// From config.json's text and the files beside it; of GGUF from the opened checkpoint.
Result<WeightLoader> loader_for(const std::string& path, int layer,
                                const WeightLoader::Options& options);

// In an order that `seed` decides, those that `wanted` says (all without it). What load answers goes
// to `answers` when given, in the order of `tensors`: 1, 0, and -1 for tensors not pushed.
Status push(WeightLoader& loader, const std::vector<StoredTensor>& tensors, std::uint64_t seed,
            const std::function<bool(const std::string&)>& wanted = {},
            std::vector<int>* answers = nullptr);

// Every bit of two layers' weights; empty, or where they differ.
//   slots  local experts to compare
std::string weights_difference(MoeLayerWeights& got, MoeLayerWeights& want, std::int64_t slots);
std::string weights_difference(const ExpertWeightsView& got, const ExpertWeightsView& want);

}  // namespace moesaic::test
