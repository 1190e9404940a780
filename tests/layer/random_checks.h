// What must hold of every layer and call, whatever they are: checked on random ones.
#pragma once

#include <vector>

#include "layer/layer_case.h"
#include "layer/random_layer.h"
#include "support/random.h"

namespace moesaic::test {

// Rows of a call, with the token of each where the layer routes by token.
struct RandomRows {
  Tensor hidden_states;  // [M, H]
  Tensor tokens;         // [M] I32 or nothing

  FusedMoE::Args args() const;
  RandomRows take(const std::vector<std::int64_t>& rows) const;
};

// A layer that was made of `drawn`, a call of it, and what came out.
struct RandomCall {
  const RandomLayer& drawn;
  const LayerTensors& tensors;
  const FusedMoE& layer;
  const RandomRows& rows;
  const LayerRun& run;
};

// Each fails the test that calls it, with what was found.
void expect_within_bound(const RandomCall& c);  // of float64 arithmetic
// The bits of a row are its own: again, in another order, in smaller batches, from rows that lie
// apart, in a layer of other chunks and threads.
void expect_rows_by_themselves(const RandomCall& c, Rng& rng);
// Beside rows of zeros, NaN and huge numbers too.
void expect_unmoved_by_neighbours(const RandomCall& c, Rng& rng);
// What a call reported, given to the next one, has its bits; ids of any type.
void expect_same_through_doors(const RandomCall& c, Rng& rng);
void expect_padding_left_out(const RandomCall& c, Rng& rng);
// Shared experts into a tensor of their own, and the output in the place of the rows.
void expect_other_outputs(const RandomCall& c);
// On a GPU: ids, weights and logits are the CPU's; tensors on the device give the bits of host ones.
void expect_as_on_the_cpu(const RandomCall& c);
void expect_same_enqueued(const RandomCall& c);

}  // namespace moesaic::test
