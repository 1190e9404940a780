// A layer that changes while it lives. The program balances its experts itself: it counts, changes two
// experts' places and tells the layer. Then the layer becomes one of two ranks.
//   example_live_layer FOLDER
#include <moesaic/eplb.h>
#include <moesaic/fused_moe.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

using moesaic::DType;
using moesaic::FusedMoE;
using moesaic::Status;
using moesaic::Tensor;

// The caller's side of expert load balancing: maps, and a counter for each slot.
struct Balance {
  moesaic::ExpertMaps maps;
  std::vector<std::int32_t> load;

  Status tell(FusedMoE& layer) {
    moesaic::EplbState state;
    state.logical_to_physical = maps.logical_to_physical;
    state.replica_count = maps.replica_count;
    state.max_replicas = maps.max_replicas;
    state.load = load;
    state.record = true;
    return layer.set_eplb_state(state, maps.physical_to_logical);
  }
};

// What the layer keeps of the experts in two slots, exchanged.
Status swap_slots(const FusedMoE& layer, std::int64_t a, std::int64_t b) {
  MOESAIC_ASSIGN_OR_RETURN(const std::vector<moesaic::ExpertPart> parts,
                           layer.get_expert_weights());
  for (const moesaic::ExpertPart& part : parts) {
    std::byte* const rows = part.rows.data;
    const std::int64_t bytes = part.rows.dim(1);
    std::swap_ranges(rows + a * bytes, rows + (a + 1) * bytes, rows + b * bytes);
  }
  return {};
}

Status run(const std::string& folder) {
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::Checkpoint checkpoint, moesaic::Checkpoint::open(folder));
  const moesaic::MoeLayerSpec spec = checkpoint.layers().front();
  FusedMoE::Options options;
  options.ranks.enable_eplb = true;
  options.ranks.num_redundant_experts = 2;
  MOESAIC_ASSIGN_OR_RETURN(FusedMoE layer,
                           FusedMoE::from_checkpoint(checkpoint, spec.layer, options));

  constexpr std::int64_t kTokens = 4;
  MOESAIC_ASSIGN_OR_RETURN(Tensor x, Tensor::zeros(DType::kF32, {kTokens, spec.hidden_size}));
  for (std::int64_t i = 0; i < kTokens * spec.hidden_size; ++i) {
    x.as<float>()[i] = static_cast<float>(i * 37 % 101 - 50) / 50;
  }
  MOESAIC_ASSIGN_OR_RETURN(Tensor before, Tensor::zeros(DType::kF32, x.shape()));
  MOESAIC_ASSIGN_OR_RETURN(Tensor after, Tensor::zeros(DType::kF32, x.shape()));

  std::vector<std::int32_t> slots = layer.physical_to_logical();
  Balance balance;
  balance.load.assign(slots.size(), 0);
  MOESAIC_ASSIGN_OR_RETURN(balance.maps, moesaic::make_expert_maps(slots, spec.num_experts));
  MOESAIC_RETURN_IF_ERROR(balance.tell(layer));
  MOESAIC_RETURN_IF_ERROR(layer.forward(x.view(), before.view()));
  std::int64_t rows = 0;
  for (const std::int32_t n : balance.load) rows += n;

  // Between two calls: weights and maps change together. This time nobody counts.
  MOESAIC_RETURN_IF_ERROR(swap_slots(layer, 0, 1));
  std::swap(slots[0], slots[1]);
  MOESAIC_ASSIGN_OR_RETURN(balance.maps, moesaic::make_expert_maps(slots, spec.num_experts));
  MOESAIC_RETURN_IF_ERROR(balance.tell(layer));
  MOESAIC_RETURN_IF_ERROR(layer.set_eplb_recording(false));
  MOESAIC_RETURN_IF_ERROR(layer.forward(x.view(), after.view()));
  const bool same =
      std::memcmp(before.data(), after.data(), static_cast<std::size_t>(before.bytes())) == 0;
  std::printf("%lld rows went to the experts; after two changed places: %s\n",
              static_cast<long long>(rows), same ? "the same bits" : "other bits");

  // The first of two ranks from now on, whose parts of the output the program would add up.
  FusedMoE::World world;
  world.parallel.ep_size = 2;
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::MoeLayerWeights all,
                           checkpoint.load_layer(spec.layer, moesaic::ParallelConfig()));
  MOESAIC_RETURN_IF_ERROR(layer.update_expert_map(world, *all.experts));
  MOESAIC_RETURN_IF_ERROR(layer.forward(x.view(), after.view()));
  const std::vector<std::int32_t> map = layer.expert_map();
  std::printf("rank %d of %d has %lld of %lld slots; the last slot is %s\n",
              layer.parallel().ep_rank, layer.parallel().ep_size,
              static_cast<long long>(layer.local_num_experts()),
              static_cast<long long>(layer.global_num_experts()),
              map.back() < 0 ? "another rank's" : "its own");
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: example_live_layer FOLDER\n");
    return 2;
  }
  const Status status = run(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
