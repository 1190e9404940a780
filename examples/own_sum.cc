// One layer on two ranks (threads) that leave the last sum to the program, which puts its residual
// stream into it: one all-reduce for both.
//   example_own_sum FOLDER
#include <moesaic/communicator.h>
#include <moesaic/fused_moe.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using moesaic::Communicator;
using moesaic::DType;
using moesaic::Status;
using moesaic::Tensor;

Status run_rank(const std::string& folder, const std::shared_ptr<Communicator>& world) {
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::Checkpoint checkpoint, moesaic::Checkpoint::open(folder));
  const moesaic::MoeLayerSpec& spec = checkpoint.layers().front();
  moesaic::FusedMoE::Options options;
  options.parallel.ep_size = world->size();  // every rank owns some experts, all have all tokens
  options.parallel.ep_rank = world->rank();
  options.ranks.communicator = world;
  options.ranks.reduce_results = false;
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::FusedMoE layer,
                           moesaic::FusedMoE::from_checkpoint(checkpoint, spec.layer, options));

  constexpr std::int64_t kTokens = 4;
  MOESAIC_ASSIGN_OR_RETURN(Tensor x, Tensor::zeros(DType::kF32, {kTokens, spec.hidden_size}));
  for (std::int64_t i = 0; i < kTokens * spec.hidden_size; ++i) {
    x.as<float>()[i] = static_cast<float>(i * 37 % 101 - 50) / 50;
  }
  MOESAIC_ASSIGN_OR_RETURN(Tensor y, Tensor::zeros(DType::kF32, x.shape()));
  MOESAIC_RETURN_IF_ERROR(layer.forward(x.view(), y.view()));
  // What must enter once is added by one rank, or by any where the output is complete.
  if (layer.output_is_reduced() || world->rank() == 0) {
    for (std::int64_t i = 0; i < kTokens * spec.hidden_size; ++i) {
      y.as<float>()[i] += x.as<float>()[i];
    }
  }
  MOESAIC_RETURN_IF_ERROR(layer.maybe_all_reduce(y.view()));
  std::printf("rank %d: complete before the sum: %s, first value %.6f\n", world->rank(),
              layer.output_is_reduced() ? "yes" : "no", static_cast<double>(y.as<float>()[0]));
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: example_own_sum FOLDER\n");
    return 2;
  }
  auto ranks = moesaic::make_in_process_communicators(2);
  if (!ranks.ok()) return 1;
  std::vector<Status> status(ranks->size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks->size(); ++r) {
    threads.emplace_back([&, r] {
      status[r] = run_rank(argv[1], std::shared_ptr<Communicator>(std::move((*ranks)[r])));
    });
  }
  for (std::thread& t : threads) t.join();
  for (const Status& s : status) {
    if (!s.ok()) std::fprintf(stderr, "%s\n", s.to_string().c_str());
    if (!s.ok()) return 1;
  }
  return 0;
}
