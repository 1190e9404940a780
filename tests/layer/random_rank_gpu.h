// A rank's call with memory of its GPU, put on a stream, captured and replayed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "layer/random_world.h"
#include "moesaic/communicator.h"
#include "support/random.h"

namespace moesaic::test {

// Looks at what an executed call wrote.
using CheckRows = std::function<void(const Tensor& output, const Tensor& shared)>;

// Whether enqueue takes the rows of every rank.
bool enqueue_takes(const RandomRanks& c, const RankCall& call);

// Collective. `same` is at the same place on all ranks, `own` is this rank's. What is wrong, or empty.
std::string enqueue_rows(const FusedMoE& layer, const RankRows& rows, bool inplace,
                         Communicator& world, Rng& same, Rng& own, const CheckRows& check);

// How many graphs were replayed so far, by all ranks.
std::int64_t replayed_graphs();

}  // namespace moesaic::test
