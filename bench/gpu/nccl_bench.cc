// Experts split over the GPUs of one machine: the layer right against one GPU, and the time of
// dispatch and combine beside the NVLink bandwidth measured in the same run.
// Exit code: 0 right, 1 wrong, 77 skipped (the reason is printed).
#include <CLI/CLI.hpp>

#include "moesaic/device.h"
#include "nccl_ranks.h"

using namespace moesaic;
using namespace moesaic::bench;

int main(int argc, char** argv) {
  Settings s;
  CLI::App app("Dispatch and combine between the GPUs of one machine");
  app.add_option("--ranks", s.ranks, "GPUs to use; 0: all");
  app.add_option("--tokens", s.tokens, "Tokens per GPU")->delimiter(',');
  app.add_option("--experts", s.experts, "Experts of the layer")->capture_default_str();
  app.add_option("--check-tokens", s.check_tokens, "Tokens of the check")->capture_default_str();
  app.add_option("--repeats", s.repeats, "Samples of each time")->capture_default_str();
  app.add_flag("--no-check", s.no_check, "Times only");
  app.add_flag("--no-messages", s.no_messages, "Peer windows only");
  app.add_flag("--moves", s.moves, "Only what steps pay for experts that move");
  CLI11_PARSE(app, argc, argv);

  const Status available = nccl_available();
  std::vector<int> devices;
  const CudaInfo info = query_cuda();
  for (const CudaDeviceInfo& d : info.devices) {
    if (d.available) devices.push_back(d.index);
  }
  if (!available.ok() || devices.size() < 2) {
    fmt::print("SKIPPED: {}\n",
               available.ok() ? "fewer than two usable GPUs" : available.message());
    return 77;
  }
  if (s.ranks > 0 && s.ranks < static_cast<int>(devices.size())) {
    devices.resize(static_cast<std::size_t>(s.ranks));
  }
  const int n = static_cast<int>(devices.size());
  if (n < 2 || s.experts % n != 0) {
    fmt::print("--ranks, --experts: got {} and {}, need 2 or more ranks that divide the experts\n",
               n, s.experts);
    return 2;
  }
  auto controls = must(make_in_process_communicators(n, {.timeout_ms = 120'000}), "threads");
  std::vector<Rank> ranks(static_cast<std::size_t>(n));
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].control = std::move(controls[r]);
    ranks[r].index = static_cast<int>(r);
    ranks[r].device = devices[r];
  }
  on_ranks(ranks, [](Rank& r) {
    r.nccl = must(make_nccl_communicator(r.control, r.device, {.timeout_ms = 60'000}), "nccl");
  });
  double one_way = 0, both = 0;
  copy_bandwidth(ranks, &one_way, &both);
  fmt::print(
      "{} x {}; device to device by copy engine {:.0f} GB/s one way, {:.0f} both ways at once "
      "(each); "
      "NCCL, 256 MiB to each rank: {:.0f} GB/s out of each\n",
      n, info.devices[0].name, one_way, both, nccl_bandwidth(ranks));
  if (!s.no_messages) print_latency(ranks, s.repeats);
  std::fflush(stdout);
  if (s.moves) {
    time_moves(ranks, s);
    on_ranks(ranks, [](Rank& r) { r.nccl.reset(); });
    return 0;
  }
  const bool right = s.no_check || check_layer(ranks, s);
  if (!s.no_messages) time_transport(ranks, s, both);
  time_peer_transport(ranks, s, both);
  on_ranks(ranks, [](Rank& r) { r.nccl.reset(); });
  return right ? 0 : 1;
}
