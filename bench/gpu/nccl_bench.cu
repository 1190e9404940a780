// Dispatch and combine between the GPUs of one machine: right against one GPU, and their time
// beside the NVLink bandwidth measured in the same run. One thread per GPU; the layer has
// DeepSeek-V3's shape (E 256, k 8, H 7168, I 2048, FP8 blocks) with its experts split over the
// ranks.
//   nccl_bench [--ranks N] [--tokens 128,1024,4096] [--experts 256] [--check-tokens 256]
//              [--repeats 30] [--no-check]
// Exit code: 0 right, 1 wrong, 77 skipped (the reason is printed).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "experts/cuda_experts.h"
#include "moesaic/communicator.h"
#include "moesaic/device.h"
#include "moesaic/parallel.h"

using namespace moesaic;
using Clock = std::chrono::steady_clock;

#define CHECK(x)                                                                            \
  do {                                                                                      \
    const cudaError_t e_ = (cudaError_t)(x);                                                \
    if (e_ != cudaSuccess) {                                                                \
      std::printf("FAILED %s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (0)

static void must(const Status& status, const char* what) {
  if (status.ok()) return;
  std::printf("FAILED %s: %s\n", what, status.to_string().c_str());
  std::exit(1);
}
template <class T>
static T must(Result<T> result, const char* what) {
  must(result.status(), what);
  return std::move(result).value();
}

// --- Device memory and kernels -------------------------------------------------------------------

template <class T>
struct Device1D {
  T* data = nullptr;
  std::size_t count = 0;
  Device1D() = default;
  explicit Device1D(std::size_t n) : count(n) {
    CHECK(cudaMalloc(&data, std::max<std::size_t>(n, 1) * sizeof(T)));
  }
  explicit Device1D(const std::vector<T>& from) : Device1D(from.size()) {
    CHECK(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device1D(Device1D&& o) noexcept : data(std::exchange(o.data, nullptr)), count(o.count) {}
  Device1D& operator=(Device1D&& o) noexcept {
    std::swap(data, o.data);
    std::swap(count, o.count);
    return *this;
  }
  ~Device1D() { cudaFree(data); }
  std::vector<T> host() const {
    std::vector<T> to(count);
    CHECK(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
};

// Row i of `to` is row index[i] of `from`; rows of `units` 16-byte units.
__global__ void gather_rows(const uint4* from, const int* index, uint4* to, int units) {
  const uint4* source = from + (std::size_t)index[blockIdx.x] * units;
  uint4* target = to + (std::size_t)blockIdx.x * units;
  for (int i = threadIdx.x; i < units; i += blockDim.x) target[i] = source[i];
}
// Splits received rows (hidden state, ids, weights) into the tensors the experts read.
__global__ void split_rows(const uint4* from, int units, int hidden_units, uint4* hidden, int* ids,
                           float* weights, int k) {
  const uint4* row = from + (std::size_t)blockIdx.x * units;
  for (int i = threadIdx.x; i < hidden_units; i += blockDim.x) {
    hidden[(std::size_t)blockIdx.x * hidden_units + i] = row[i];
  }
  const int* tail = reinterpret_cast<const int*>(row + hidden_units);
  for (int j = threadIdx.x; j < k; j += blockDim.x) {
    ids[blockIdx.x * k + j] = tail[j];
    weights[blockIdx.x * k + j] = __int_as_float(tail[k + j]);
  }
}
__device__ inline float value(const float* p, std::size_t i) { return p[i]; }
__device__ inline float value(const __nv_bfloat16* p, std::size_t i) {
  return __bfloat162float(p[i]);
}
// Token t: the partial rows that came back for it, in rank order; part[t][r] is a row or -1.
template <class T>
__global__ void sum_parts(const T* rows, const int* part, int ranks, int hidden, float* out) {
  const int t = blockIdx.x;
  for (int h = threadIdx.x; h < hidden; h += blockDim.x) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r) {
      const int row = part[t * ranks + r];
      if (row >= 0) sum += value(rows, (std::size_t)row * hidden + h);
    }
    out[(std::size_t)t * hidden + h] = sum;
  }
}
__global__ void round_rows(const float* from, __nv_bfloat16* to, std::size_t count) {
  for (std::size_t i = blockIdx.x * (std::size_t)blockDim.x + threadIdx.x; i < count;
       i += (std::size_t)gridDim.x * blockDim.x) {
    to[i] = __float2bfloat16(from[i]);
  }
}

// --- The layer -----------------------------------------------------------------------------------

struct Options {
  int ranks = 0, experts = 256, check_tokens = 256, repeats = 30;
  bool check = true;
  std::vector<int> tokens = {128, 1024, 4096};
};
constexpr int kTopK = 8, kHidden = 7168, kInner = 2048;

// Sixteen random experts; expert e is number e mod 16 with scales of its own, so that a wrong
// expert is another result while the host makes less than a gigabyte.
class Source final : public ExpertSource {
 public:
  explicit Source(std::vector<std::int64_t> ids) : ids_(std::move(ids)) {}
  static void prepare() {
    std::vector<std::thread> threads;
    base_.resize(16);
    for (int b = 0; b < 16; ++b) {
      threads.emplace_back([b] {
        std::mt19937_64 rng(b + 1);
        base_[b].resize(3ULL * kInner * kHidden);
        for (std::size_t i = 0; i + 8 <= base_[b].size(); i += 8) {
          std::uint64_t bits = rng();
          // Magnitudes 2^-3 .. 15/8 * 2^3: codes 0x20 .. 0x57, no NaN.
          for (int j = 0; j < 8; ++j, bits >>= 8) {
            base_[b][i + j] = (std::uint8_t)((bits & 0x80) | (0x20 + (bits & 0x7F) % 0x38));
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
  }
  Result<ExpertWeightsView> expert(std::int64_t local) override {
    const auto e = (int)ids_[(std::size_t)local];
    const auto* codes = reinterpret_cast<const std::byte*>(base_[e % 16].data());
    const auto fill = [e](std::vector<float>& s, std::size_t n, double unit) {
      s.resize(n);
      for (std::size_t i = 0; i < n; ++i) {
        s[i] = (float)(unit * (1.0 + 0.002 * e + 0.01 * (double)(i % 7)));
      }
    };
    // The codes' root mean square is about 4: rows of the products have a deviation near 1.
    fill(w13_scale_, 2 * kInner / 128 * (kHidden / 128), 0.25 / std::sqrt((double)kHidden));
    fill(w2_scale_, kHidden / 128 * (kInner / 128), 0.5 / std::sqrt((double)kInner));
    ExpertWeightsView v;
    v.w13 = ConstTensorView(codes, DType::kF8E4M3, Shape{2 * kInner, kHidden});
    v.w13_scale = ConstTensorView(reinterpret_cast<const std::byte*>(w13_scale_.data()),
                                  DType::kF32, Shape{2 * kInner / 128, kHidden / 128});
    v.w2 = ConstTensorView(codes + 2LL * kInner * kHidden, DType::kF8E4M3, Shape{kHidden, kInner});
    v.w2_scale = ConstTensorView(reinterpret_cast<const std::byte*>(w2_scale_.data()), DType::kF32,
                                 Shape{kHidden / 128, kInner / 128});
    return v;
  }

 private:
  static std::vector<std::vector<std::uint8_t>> base_;
  std::vector<std::int64_t> ids_;
  std::vector<float> w13_scale_, w2_scale_;
};
std::vector<std::vector<std::uint8_t>> Source::base_;

static MoeProblem problem_of(const Options& o, std::int64_t local, std::int64_t max_tokens) {
  MoeProblem p;
  p.num_experts = o.experts;
  p.num_local_experts = local;
  p.top_k = kTopK;
  p.hidden_size = kHidden;
  p.intermediate_size = kInner;
  p.activation = must(make_activation("silu"), "activation");
  p.quant = must(quant_scheme_from_name("fp8-block"), "scheme");
  p.activation_dtype = DType::kBF16;
  p.max_tokens = max_tokens;
  return p;
}

// Uniform routing of `tokens` rows, and their values.
struct Batch {
  std::vector<int> ids;
  std::vector<float> weights;
  std::vector<std::uint16_t> hidden;
  Batch(int tokens, int experts, std::uint64_t seed, bool values) {
    std::mt19937_64 rng(seed);
    for (int t = 0; t < tokens; ++t) {
      std::vector<int> row;
      while ((int)row.size() < kTopK) {
        const int e = (int)(rng() % (std::uint64_t)experts);
        if (std::find(row.begin(), row.end(), e) == row.end()) row.push_back(e);
      }
      ids.insert(ids.end(), row.begin(), row.end());
      for (int j = 0; j < kTopK; ++j) {
        weights.push_back((float)(0.5 + (double)(rng() % 1000) / 1000.0) / kTopK);
      }
    }
    hidden.assign((std::size_t)tokens * kHidden, 0x3F80);
    for (std::size_t i = 0; values && i < hidden.size(); ++i) {
      // Sum of four bytes: roughly normal, deviation 1, cut to bf16.
      const std::uint64_t bits = rng();
      double sum = 0;
      for (int j = 0; j < 4; ++j) sum += (double)(bits >> (8 * j) & 255) / 255.0;
      const float x = (float)((sum - 2.0) * 1.7320508);
      std::uint32_t u;
      std::memcpy(&u, &x, 4);
      hidden[i] = (std::uint16_t)(u >> 16);
    }
  }
};

// --- One rank's dispatch and combine -------------------------------------------------------------

// Which rows go where: known on every rank's host, as after the exchange of counts.
struct Routes {
  std::vector<int> send_index;             // rows in the order of destination ranks
  std::vector<std::size_t> send, receive;  // rows to and from each rank
  std::vector<int> part;                   // [tokens, ranks] row of the answer, or -1
  std::size_t received() const {
    std::size_t n = 0;
    for (const std::size_t r : receive) n += r;
    return n;
  }
};
static Routes routes_of(const std::vector<Batch>& batches, int me, int ranks, int experts) {
  Routes r;
  const auto goes = [&](const Batch& b, int t, int to) {
    for (int j = 0; j < kTopK; ++j) {
      if (b.ids[t * kTopK + j] / (experts / ranks) == to) return true;
    }
    return false;
  };
  const Batch& mine = batches[me];
  const int tokens = (int)mine.ids.size() / kTopK;
  r.part.assign((std::size_t)tokens * ranks, -1);
  for (int to = 0; to < ranks; ++to) {
    const std::size_t before = r.send_index.size();
    for (int t = 0; t < tokens; ++t) {
      if (!goes(mine, t, to)) continue;
      r.part[(std::size_t)t * ranks + to] = (int)r.send_index.size();
      r.send_index.push_back(t);
    }
    r.send.push_back(r.send_index.size() - before);
    std::size_t from = 0;
    for (int t = 0; t < (int)batches[to].ids.size() / kTopK; ++t) from += goes(batches[to], t, me);
    r.receive.push_back(from);
  }
  return r;
}

class RankBuffers {
 public:
  RankBuffers(const Routes& routes, std::size_t tokens, std::size_t row_bytes,
              std::size_t back_bytes)
      : routes_(routes),
        row_(row_bytes),
        back_(back_bytes),
        index_(routes.send_index),
        part_(routes.part),
        rows(tokens * row_bytes),
        sent(routes.send_index.size() * row_bytes),
        received(routes.received() * row_bytes),
        results(routes.received() * back_bytes),
        answers(routes.send_index.size() * back_bytes),
        out(tokens * kHidden) {}

  void dispatch(Communicator& c) {
    if (!routes_.send_index.empty()) {
      gather_rows<<<(unsigned)routes_.send_index.size(), 128>>>(
          (const uint4*)rows.data, index_.data, (uint4*)sent.data, (int)(row_ / 16));
    }
    move(c, "dispatch", sent.data, routes_.send, received.data, routes_.receive, row_);
  }
  template <class T>
  void combine(Communicator& c) {
    move(c, "combine", results.data, routes_.receive, answers.data, routes_.send, back_);
    sum_parts<<<(unsigned)(out.count / kHidden), 256>>>(
        (const T*)answers.data, part_.data, (int)routes_.send.size(), kHidden, out.data);
    CHECK(cudaDeviceSynchronize());
  }
  // Bytes to other ranks.
  double bytes_out(int me, bool back) const {
    double rows_out = 0;
    for (std::size_t r = 0; r < routes_.send.size(); ++r) {
      if ((int)r != me) rows_out += (double)(back ? routes_.receive[r] : routes_.send[r]);
    }
    return rows_out * (double)(back ? back_ : row_);
  }

 private:
  static void move(Communicator& c, const char* what, std::byte* from,
                   const std::vector<std::size_t>& send, std::byte* to,
                   const std::vector<std::size_t>& receive, std::size_t row) {
    std::vector<std::span<const std::byte>> out;
    std::vector<std::span<std::byte>> in;
    for (std::size_t r = 0; r < send.size(); ++r) {
      out.emplace_back(from, send[r] * row);
      in.emplace_back(to, receive[r] * row);
      from += send[r] * row;
      to += receive[r] * row;
    }
    must(c.exchange(what, out, in), what);
  }
  Routes routes_;
  std::size_t row_, back_;
  Device1D<int> index_, part_;

 public:
  Device1D<std::byte> rows, sent, received, results, answers;
  Device1D<float> out;
};

// --- Runs ----------------------------------------------------------------------------------------

struct Rank {
  std::shared_ptr<Communicator> control, nccl;
  int index = 0, device = 0;
};
static void on_ranks(std::vector<Rank>& ranks, const std::function<void(Rank&)>& body) {
  std::vector<std::thread> threads;
  for (Rank& r : ranks) {
    threads.emplace_back([&] {
      CHECK(cudaSetDevice(r.device));
      body(r);
    });
  }
  for (std::thread& t : threads) t.join();
}

// Median over repeats of the slowest rank.
static double median_us(std::vector<std::vector<double>> samples) {
  std::vector<double> worst;
  for (std::size_t i = 0; i < samples[0].size(); ++i) {
    double w = 0;
    for (const auto& rank : samples) w = std::max(w, rank[i]);
    worst.push_back(w);
  }
  std::sort(worst.begin(), worst.end());
  return worst[worst.size() / 2];
}
static double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Device 0 to device 1 by the copy engine, GB/s: one way, then both at once.
static void copy_bandwidth(const std::vector<Rank>& ranks, double* one_way, double* both) {
  constexpr std::size_t kBytes = 1ULL << 30;
  const int a = ranks[0].device, b = ranks[1].device;
  std::byte *pa[2], *pb[2];
  cudaStream_t s[2];
  for (int i = 0; i < 2; ++i) {
    CHECK(cudaSetDevice(i == 0 ? a : b));
    const cudaError_t peer = cudaDeviceEnablePeerAccess(i == 0 ? b : a, 0);
    if (peer != cudaSuccess) std::printf("peer access: %s\n", cudaGetErrorString(peer));
    (void)cudaGetLastError();
    CHECK(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
  }
  CHECK(cudaSetDevice(a));
  for (auto& p : pa) CHECK(cudaMalloc(&p, kBytes));
  CHECK(cudaSetDevice(b));
  for (auto& p : pb) CHECK(cudaMalloc(&p, kBytes));
  for (const bool two : {false, true}) {
    double best = 0;
    for (int i = 0; i < 5; ++i) {
      CHECK(cudaSetDevice(a));
      const auto begin = Clock::now();
      CHECK(cudaMemcpyPeerAsync(pb[0], b, pa[0], a, kBytes, s[0]));
      CHECK(cudaSetDevice(b));
      if (two) CHECK(cudaMemcpyPeerAsync(pa[1], a, pb[1], b, kBytes, s[1]));
      CHECK(cudaStreamSynchronize(s[0]));
      CHECK(cudaStreamSynchronize(s[1]));
      best = std::max(best, (double)kBytes / us_since(begin) * 1e-3);
    }
    *(two ? both : one_way) = best;
  }
  for (int i = 0; i < 2; ++i) {
    CHECK(cudaFree(pa[i]));
    CHECK(cudaFree(pb[i]));
    CHECK(cudaStreamDestroy(s[i]));
  }
}

// Large device messages between all ranks, GB/s out of each.
static double nccl_bandwidth(std::vector<Rank>& ranks) {
  constexpr std::size_t kBytes = 256ULL << 20;
  std::vector<std::vector<double>> times(ranks.size());
  const std::size_t n = ranks.size();
  on_ranks(ranks, [&](Rank& r) {
    const Device1D<std::byte> out(n * kBytes), in(n * kBytes);
    for (int i = 0; i < 8; ++i) {
      std::vector<std::span<const std::byte>> send(n);
      std::vector<std::span<std::byte>> recv(n);
      for (std::size_t p = 0; p < n; ++p) {
        if ((int)p == r.index) continue;
        send[p] = {out.data + p * kBytes, kBytes};
        recv[p] = {in.data + p * kBytes, kBytes};
      }
      must(r.control->barrier("bench"), "barrier");
      const auto begin = Clock::now();
      must(r.nccl->exchange("bandwidth", send, recv), "exchange");
      if (i >= 3) times[(std::size_t)r.index].push_back(us_since(begin));
    }
  });
  return (double)(kBytes * (n - 1)) / median_us(times) * 1e-3;
}

static std::vector<std::int64_t> experts_of(const Options& o, int rank, int ranks) {
  std::vector<std::int64_t> ids;
  for (int e = rank * (o.experts / ranks); e < (rank + 1) * (o.experts / ranks); ++e) {
    ids.push_back(e);
  }
  return ids;
}

struct Experts1 {
  std::unique_ptr<cuda::CudaExperts> experts;
  Device1D<std::byte> workspace;
  Experts1(const Options& o, std::vector<std::int64_t> ids, std::int64_t max_tokens, int device) {
    const MoeProblem p = problem_of(o, (std::int64_t)ids.size(), max_tokens);
    Source source(std::move(ids));
    experts = must(cuda::CudaExperts::create(p, source, device), "experts");
    workspace = Device1D<std::byte>(
        (std::size_t)must(cuda::CudaExperts::workspace_size(p, max_tokens), "workspace"));
  }
  void run(std::int64_t tokens, const void* hidden, const int* ids, const float* weights,
           const int* map, float* out) const {
    cuda::CudaExpertsArgs a;
    a.tokens = tokens;
    a.hidden_states = hidden;
    a.topk_ids = ids;
    a.topk_weights = weights;
    a.expert_map = map;
    a.output = out;
    a.output_dtype = DType::kF32;
    a.workspace = workspace.data;
    a.workspace_bytes = (std::int64_t)workspace.count;
    must(experts->enqueue(nullptr, a), "experts");
    CHECK(cudaDeviceSynchronize());
  }
};

// rel. L2 between one GPU with all experts and all ranks with their parts; combine in fp32 or bf16.
static bool check(std::vector<Rank>& ranks, const Options& o) {
  const int n = (int)ranks.size();
  std::vector<Batch> batches;
  for (int r = 0; r < n; ++r) {
    // Uneven: the last rank has a third of the rows.
    batches.emplace_back(r + 1 == n ? o.check_tokens / 3 : o.check_tokens, o.experts, 100 + r,
                         true);
  }
  std::vector<std::vector<float>> want(n);
  {
    CHECK(cudaSetDevice(ranks[0].device));
    std::vector<std::int64_t> all;
    for (int e = 0; e < o.experts; ++e) all.push_back(e);
    const Experts1 one(o, all, o.check_tokens, ranks[0].device);
    for (int r = 0; r < n; ++r) {
      const auto tokens = (std::int64_t)batches[r].ids.size() / kTopK;
      const Device1D<std::uint16_t> hidden(batches[r].hidden);
      const Device1D<int> ids(batches[r].ids);
      const Device1D<float> weights(batches[r].weights), out((std::size_t)tokens * kHidden);
      one.run(tokens, hidden.data, ids.data, weights.data, nullptr, out.data);
      want[r] = out.host();
    }
  }
  std::vector<double> error32(n), error16(n), layer_us(n);
  on_ranks(ranks, [&](Rank& rank) {
    const Batch& b = batches[rank.index];
    const int tokens = (int)b.ids.size() / kTopK;
    const Routes routes = routes_of(batches, rank.index, n, o.experts);
    const std::int64_t rows = (std::int64_t)routes.received();
    const Experts1 mine(o, experts_of(o, rank.index, n), (std::int64_t)n * o.check_tokens,
                        rank.device);
    std::vector<int> map(o.experts, -1);
    for (int e = 0; e < o.experts / n; ++e) map[rank.index * (o.experts / n) + e] = e;
    const Device1D<int> device_map(map);
    // A row: bf16 hidden state, ids, weights.
    constexpr std::size_t kRow = 2 * kHidden + 8 * kTopK;
    std::vector<std::byte> packed(kRow * tokens);
    for (int t = 0; t < tokens; ++t) {
      std::byte* to = packed.data() + t * kRow;
      std::memcpy(to, &b.hidden[(std::size_t)t * kHidden], 2 * kHidden);
      std::memcpy(to + 2 * kHidden, &b.ids[t * kTopK], 4 * kTopK);
      std::memcpy(to + 2 * kHidden + 4 * kTopK, &b.weights[t * kTopK], 4 * kTopK);
    }
    RankBuffers buffers(routes, (std::size_t)tokens, kRow, 4 * kHidden);
    RankBuffers narrow(routes, (std::size_t)tokens, kRow, 2 * kHidden);
    CHECK(cudaMemcpy(buffers.rows.data, packed.data(), packed.size(), cudaMemcpyHostToDevice));
    const Device1D<std::uint16_t> hidden((std::size_t)rows * kHidden);
    const Device1D<int> ids((std::size_t)rows * kTopK);
    const Device1D<float> weights((std::size_t)rows * kTopK);
    const auto error = [&](const std::vector<float>& got) {
      double diff = 0, norm = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double w = want[rank.index][i];
        diff += (got[i] - w) * (got[i] - w);
        norm += w * w;
      }
      return norm > 0 && std::isfinite(diff) ? std::sqrt(diff / norm) : INFINITY;
    };
    for (int repeat = 0; repeat < 3; ++repeat) {
      must(rank.control->barrier("layer"), "barrier");
      const auto begin = Clock::now();
      buffers.dispatch(*rank.nccl);
      if (rows > 0) {
        split_rows<<<(unsigned)rows, 128>>>((const uint4*)buffers.received.data, (int)(kRow / 16),
                                            2 * kHidden / 16, (uint4*)hidden.data, ids.data,
                                            weights.data, kTopK);
        mine.run(rows, hidden.data, ids.data, weights.data, device_map.data,
                 (float*)buffers.results.data);
      }
      buffers.combine<float>(*rank.nccl);
      layer_us[rank.index] = us_since(begin);
    }
    error32[rank.index] = error(buffers.out.host());
    if (rows > 0) {
      round_rows<<<1024, 256>>>((const float*)buffers.results.data,
                                (__nv_bfloat16*)narrow.results.data, (std::size_t)rows * kHidden);
    }
    CHECK(cudaDeviceSynchronize());
    narrow.combine<__nv_bfloat16>(*rank.nccl);
    error16[rank.index] = error(narrow.out.host());
  });
  bool right = true;
  for (int r = 0; r < n; ++r) {
    // fp32: only the order of k + R additions differs. bf16: one rounding of each partial sum.
    const bool ok = error32[r] <= 1e-6 && error16[r] <= 0x1p-8 && error16[r] > 0;
    right = right && ok;
    std::printf(
        "check rank %d: rel. L2 against one GPU %.2e (fp32 back), %.2e (bf16 back), layer "
        "%.0f us: %s\n",
        r, error32[r], error16[r], layer_us[r], ok ? "ok" : "WRONG");
  }
  return right;
}

static void bench(std::vector<Rank>& ranks, const Options& o, int tokens, bool fp8, double link) {
  const std::size_t n = ranks.size();
  const std::size_t row = (fp8 ? kHidden + kHidden / 128 * 4 : 2 * kHidden) + 8 * kTopK;
  std::vector<Batch> batches;
  for (std::size_t r = 0; r < n; ++r) batches.emplace_back(tokens, o.experts, 7 + r, false);
  std::vector<std::vector<double>> there(n), back(n);
  std::vector<double> out(n), in(n), distinct(n);
  on_ranks(ranks, [&](Rank& rank) {
    const auto i = (std::size_t)rank.index;
    const Routes routes = routes_of(batches, rank.index, (int)n, o.experts);
    RankBuffers b(routes, (std::size_t)tokens, row, 2 * kHidden);
    CHECK(cudaMemset(b.rows.data, 1, b.rows.count));
    CHECK(cudaMemset(b.results.data, 0, b.results.count));
    out[i] = b.bytes_out(rank.index, false);
    in[i] = b.bytes_out(rank.index, true);
    distinct[i] = (double)routes.send_index.size() / tokens;
    for (int repeat = 0; repeat < o.repeats + 5; ++repeat) {
      CHECK(cudaDeviceSynchronize());
      must(rank.control->barrier("bench"), "barrier");
      auto begin = Clock::now();
      b.dispatch(*rank.nccl);
      if (repeat >= 5) there[i].push_back(us_since(begin));
      must(rank.control->barrier("bench"), "barrier");
      begin = Clock::now();
      b.combine<__nv_bfloat16>(*rank.nccl);
      if (repeat >= 5) back[i].push_back(us_since(begin));
    }
  });
  const double a = median_us(there), b = median_us(back);
  const double most_out = *std::max_element(out.begin(), out.end());
  const double most_in = *std::max_element(in.begin(), in.end());
  std::printf("| %d | %s | %.2f | %.2f | %.0f | %.0f | %.0f %% | %.2f | %.0f | %.0f | %.0f %% |\n",
              tokens, fp8 ? "fp8" : "bf16", distinct[0], most_out * 1e-6, a, most_out / a * 1e-3,
              100 * most_out / a * 1e-3 / link, most_in * 1e-6, b, most_in / b * 1e-3,
              100 * most_in / b * 1e-3 / link);
  std::fflush(stdout);
}

static Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string a = argv[i];
    const auto next = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (a == "--ranks")
      o.ranks = std::atoi(next());
    else if (a == "--experts")
      o.experts = std::atoi(next());
    else if (a == "--check-tokens")
      o.check_tokens = std::atoi(next());
    else if (a == "--repeats")
      o.repeats = std::atoi(next());
    else if (a == "--no-check")
      o.check = false;
    else if (a == "--tokens") {
      o.tokens.clear();
      std::string list = next();
      for (char* p = std::strtok(list.data(), ","); p; p = std::strtok(nullptr, ",")) {
        o.tokens.push_back(std::atoi(p));
      }
    } else {
      std::printf("unknown option %s\n", a.c_str());
      std::exit(2);
    }
  }
  return o;
}

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const Status available = nccl_available();
  std::vector<int> devices;
  for (const CudaDeviceInfo& d : query_cuda().devices) {
    if (d.available) devices.push_back(d.index);
  }
  if (!available.ok() || devices.size() < 2) {
    std::printf("SKIPPED: %s\n",
                available.ok() ? "fewer than two usable GPUs" : available.message().c_str());
    return 77;
  }
  if (o.ranks > 0 && o.ranks < (int)devices.size()) devices.resize((std::size_t)o.ranks);
  const int n = (int)devices.size();
  if (n < 2 || o.experts % n != 0) {
    std::printf("--ranks, --experts: got %d and %d, need 2 or more ranks that divide the experts\n",
                n, o.experts);
    return 2;
  }
  auto controls =
      must(make_in_process_communicators(n, CommunicatorOptions{.timeout_ms = 120'000}), "threads");
  std::vector<Rank> ranks((std::size_t)n);
  for (int r = 0; r < n; ++r) {
    ranks[r].control = std::move(controls[(std::size_t)r]);
    ranks[r].index = r;
    ranks[r].device = devices[(std::size_t)r];
  }
  on_ranks(ranks, [](Rank& r) {
    r.nccl =
        must(make_nccl_communicator(r.control, r.device, CommunicatorOptions{.timeout_ms = 60'000}),
             "nccl");
  });
  double one_way = 0, both = 0;
  copy_bandwidth(ranks, &one_way, &both);
  const double link = nccl_bandwidth(ranks);
  std::printf(
      "%d x %s; device to device by copy engine %.0f GB/s one way, %.0f both ways at once "
      "(each); NCCL, 256 MiB to each rank: %.0f GB/s out of each\n",
      n, query_cuda().devices[0].name.c_str(), one_way, both, link);
  std::fflush(stdout);
  bool right = true;
  if (o.check) {
    Source::prepare();
    right = check(ranks, o);
  }
  std::printf(
      "\n%d ranks, E %d, k %d, H %d, uniform routing, results back in bf16; median of %d; %% "
      "of %.0f GB/s\n",
      n, o.experts, kTopK, kHidden, o.repeats, one_way);
  std::printf(
      "| tokens per rank | rows | ranks per row | dispatch MB out | us | GB/s | of the link "
      "| combine MB out | us | GB/s | of the link |\n|--:|---|--:|--:|--:|--:|--:|--:|--:|--:"
      "|--:|\n");
  for (const int tokens : o.tokens) {
    for (const bool fp8 : {true, false}) bench(ranks, o, tokens, fp8, one_way);
  }
  on_ranks(ranks, [](Rank& r) { r.nccl.reset(); });
  return right ? 0 : 1;
}
