// What one rank of a random world does, and whether it is right.
#pragma once

#include <memory>
#include <string>

#include "layer/random_world.h"
#include "moesaic/communicator.h"

namespace moesaic::test {

// Makes the layer and goes through the calls of all eras. What is wrong, or empty. `refused`: the layer
// is one that ranks cannot have.
std::string run_rank(const RandomRanks& c, std::shared_ptr<Communicator> communicator,
                     bool& refused);

}  // namespace moesaic::test
