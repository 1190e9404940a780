// What the links give, and what a message costs whatever its size.
#include <algorithm>
#include <span>
#include <thread>

#include "nccl_ranks.h"
#include "parallel/nccl_library.h"

namespace moesaic::bench {
namespace {

using parallel::nccl_library;
using parallel::NcclConfig;
using parallel::NcclLibrary;
using parallel::NcclUniqueId;

using Out = std::span<const std::byte>;
using In = std::span<std::byte>;

// A small message from each rank to the next by NCCL's own calls, with a communicator that blocks
// or not.
double bare_nccl_us(std::vector<Rank>& ranks, int repeats, int blocking) {
  const NcclLibrary& nccl = *must(nccl_library(), "nccl");
  NcclUniqueId id = {};
  if (nccl.get_unique_id(&id) != NcclLibrary::kSuccess) return -1;
  Stopwatch watch(ranks.size());
  on_ranks(ranks, [&](Rank& r) {
    NcclConfig config;
    config.blocking = blocking;
    void* comm = nullptr;
    const int size = static_cast<int>(ranks.size());
    const auto settle = [&](int code) {
      while (code == NcclLibrary::kInProgress) {
        if (nccl.comm_get_async_error(comm, &code) != NcclLibrary::kSuccess) break;
      }
      if (code != NcclLibrary::kSuccess) must(Status(StatusCode::kDevice, "nccl"), "bare nccl");
    };
    settle(nccl.comm_init_rank_config(&comm, size, id, r.index, &config));
    cudaStream_t stream = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    const DeviceArray out(4096), in(4096);
    const auto once = [&] {
      (void)nccl.group_start();
      (void)nccl.send(out.as(), 4096, NcclLibrary::kBytes, (r.index + 1) % size, comm, stream);
      (void)nccl.recv(in.as(), 4096, NcclLibrary::kBytes, (r.index + size - 1) % size, comm,
                      stream);
      settle(nccl.group_end());
      must(cudaStreamSynchronize(stream), "nccl");
    };
    for (int i = 0; i < 3; ++i) once();
    watch.run(r, repeats, once);
    (void)nccl.comm_abort(comm);
    must(cudaStreamDestroy(stream), "stream");
  });
  return watch.median_us();
}

}  // namespace

void on_ranks(std::vector<Rank>& ranks, const std::function<void(Rank&)>& body) {
  std::vector<std::thread> threads;
  for (Rank& r : ranks) {
    threads.emplace_back([&] {
      must(cudaSetDevice(r.device), "device");
      body(r);
    });
  }
  for (std::thread& t : threads) t.join();
}

void Stopwatch::run(const Rank& rank, int repeats, const std::function<void()>& body) {
  for (int i = 0; i < repeats; ++i) {
    must(cudaDeviceSynchronize(), "before");
    must(rank.control->barrier("bench"), "barrier");
    const auto begin = Clock::now();
    body();
    us_[static_cast<std::size_t>(rank.index)].push_back(us_since(begin));
  }
}

double Stopwatch::median_us() const {
  std::vector<double> worst;
  for (std::size_t i = 0; i < us_.front().size(); ++i) {
    double w = 0;
    for (const auto& rank : us_) w = std::max(w, rank[i]);
    worst.push_back(w);
  }
  std::sort(worst.begin(), worst.end());
  return worst[worst.size() / 2];
}

void copy_bandwidth(const std::vector<Rank>& ranks, double* one_way, double* both) {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  const int device[2] = {ranks[0].device, ranks[1].device};
  cudaStream_t s[2];
  std::byte *from[2], *to[2];  // from[i] lies on device i, to[i] on the other
  for (int i = 0; i < 2; ++i) {
    must(cudaSetDevice(device[i]), "device");
    const cudaError_t peer = cudaDeviceEnablePeerAccess(device[1 - i], 0);
    if (peer != cudaSuccess) fmt::print("peer access: {}\n", cudaGetErrorString(peer));
    (void)cudaGetLastError();
    must(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking), "stream");
    must(cudaMalloc(&from[i], kBytes), "memory");
    must(cudaMalloc(&to[1 - i], kBytes), "memory");
  }
  for (const bool two : {false, true}) {
    double best = 0;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const auto begin = Clock::now();
      for (int i = 0; i < (two ? 2 : 1); ++i) {
        must(cudaSetDevice(device[i]), "device");
        must(cudaMemcpyPeerAsync(to[i], device[1 - i], from[i], device[i], kBytes, s[i]), "copy");
      }
      for (cudaStream_t stream : s) must(cudaStreamSynchronize(stream), "copy");
      best = std::max(best, static_cast<double>(kBytes) / us_since(begin) * 1e-3);
    }
    *(two ? both : one_way) = best;
  }
  for (int i = 0; i < 2; ++i) {
    must(cudaFree(from[i]), "free");
    must(cudaFree(to[i]), "free");
    must(cudaStreamDestroy(s[i]), "stream");
  }
}

double nccl_bandwidth(std::vector<Rank>& ranks) {
  constexpr std::size_t kBytes = std::size_t{256} << 20;
  const std::size_t n = ranks.size();
  Stopwatch watch(n);
  on_ranks(ranks, [&](Rank& r) {
    const DeviceArray out(n * kBytes), in(n * kBytes);
    std::vector<Out> send(n);
    std::vector<In> recv(n);
    for (std::size_t p = 0; p < n; ++p) {
      if (static_cast<int>(p) == r.index) continue;
      send[p] = {out.as() + p * kBytes, kBytes};
      recv[p] = {in.as() + p * kBytes, kBytes};
    }
    const auto once = [&] { must(r.nccl->exchange("bandwidth", send, recv), "exchange"); };
    for (int i = 0; i < 3; ++i) once();
    watch.run(r, 5, once);
  });
  return static_cast<double>(kBytes * (n - 1)) / watch.median_us() * 1e-3;
}

void print_latency(std::vector<Rank>& ranks, int repeats) {
  const std::size_t n = ranks.size();
  Stopwatch agree(n), exchange(n);
  on_ranks(ranks, [&](Rank& r) {
    // As many words as NCCL's communicator agrees on before a call.
    std::vector<std::int64_t> mine(2 + 2 * n), all(n * mine.size());
    const std::vector<Out> words(n, std::as_bytes(std::span<const std::int64_t>(mine)));
    std::vector<In> theirs;
    for (std::size_t p = 0; p < n; ++p) {
      theirs.push_back(
          std::as_writable_bytes(std::span(all).subspan(p * mine.size(), mine.size())));
    }
    agree.run(r, repeats, [&] { must(r.control->exchange("words", words, theirs), "words"); });
    const DeviceArray out(4096 * n), in(4096 * n);
    std::vector<Out> send;
    std::vector<In> recv;
    for (std::size_t p = 0; p < n; ++p) {
      send.emplace_back(out.as() + p * 4096, 4096);
      recv.emplace_back(in.as() + p * 4096, 4096);
    }
    exchange.run(r, repeats, [&] { must(r.nccl->exchange("small", send, recv), "small"); });
  });
  fmt::print(
      "4 KiB to each rank: {:.0f} us through a Communicator, of which {:.0f} us for all ranks to "
      "learn all sizes; NCCL's own send and receive {:.0f} us with a communicator that does not "
      "block, {:.0f} us with one that does\n",
      exchange.median_us(), agree.median_us(), bare_nccl_us(ranks, repeats, 0),
      bare_nccl_us(ranks, repeats, 1));
}

}  // namespace moesaic::bench
