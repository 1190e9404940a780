#include "layer/random_rank_gpu.h"

namespace moesaic::test {

bool enqueue_takes(const RandomRanks&, const RankCall&) { return false; }
std::string enqueue_rows(const FusedMoE&, const RankRows&, bool, Communicator&, Rng&, Rng&,
                         const CheckRows&) {
  return "no CUDA";
}
std::int64_t replayed_graphs() { return 0; }

}  // namespace moesaic::test
