// The layer over GPUs against the layer on one: DeepSeek-V3's shape in FP8 blocks, the experts
// split, uneven rows.
#include "nccl_layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "moesaic/fused_moe.h"
#include "moesaic/parallel.h"

namespace moesaic::bench {
namespace {

// Sixteen random experts; expert e is number e mod 16 with scales of its own, so that a wrong
// expert is another result while the host makes less than a gigabyte.
class Source final : public ExpertSource {
 public:
  explicit Source(std::vector<std::int64_t> ids) : ids_(std::move(ids)) {}
  static void prepare() {
    std::vector<std::thread> threads;
    base_.resize(16);
    for (std::size_t b = 0; b < 16; ++b) {
      threads.emplace_back([b] {
        std::mt19937_64 rng(b + 1);
        base_[b].resize(static_cast<std::size_t>(3 * kInner * kHidden));
        for (std::size_t i = 0; i + 8 <= base_[b].size(); i += 8) {
          std::uint64_t bits = rng();
          // Magnitudes 2^-3 .. 15/8 * 2^3: codes 0x20 .. 0x57, no NaN.
          for (std::size_t j = 0; j < 8; ++j, bits >>= 8) {
            base_[b][i + j] =
                static_cast<std::uint8_t>((bits & 0x80) | (0x20 + (bits & 0x7F) % 0x38));
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
  }
  Result<ExpertWeightsView> expert(std::int64_t local) override {
    const std::int64_t e = ids_[static_cast<std::size_t>(local)];
    const auto* codes =
        reinterpret_cast<const std::byte*>(base_[static_cast<std::size_t>(e % 16)].data());
    const auto fill = [e](std::vector<float>& s, std::int64_t n, double unit) {
      s.resize(static_cast<std::size_t>(n));
      for (std::size_t i = 0; i < s.size(); ++i) {
        s[i] = static_cast<float>(
            unit * (1.0 + 0.002 * static_cast<double>(e) + 0.01 * static_cast<double>(i % 7)));
      }
    };
    // The codes' root mean square is about 4: rows of the products have a deviation near 1.
    fill(w13_scale_, 2 * kInner / 128 * (kHidden / 128), 0.25 / std::sqrt(double{kHidden}));
    fill(w2_scale_, kHidden / 128 * (kInner / 128), 0.5 / std::sqrt(double{kInner}));
    const auto scales = [](const std::vector<float>& s, std::int64_t rows, std::int64_t columns) {
      return ConstTensorView(reinterpret_cast<const std::byte*>(s.data()), DType::kF32,
                             Shape{rows / 128, columns / 128});
    };
    ExpertWeightsView v;
    v.w13 = ConstTensorView(codes, DType::kF8E4M3, Shape{2 * kInner, kHidden});
    v.w13_scale = scales(w13_scale_, 2 * kInner, kHidden);
    v.w2 = ConstTensorView(codes + 2 * kInner * kHidden, DType::kF8E4M3, Shape{kHidden, kInner});
    v.w2_scale = scales(w2_scale_, kHidden, kInner);
    return v;
  }

 private:
  static std::vector<std::vector<std::uint8_t>> base_;
  std::vector<std::int64_t> ids_;
  std::vector<float> w13_scale_, w2_scale_;
};
std::vector<std::vector<std::uint8_t>> Source::base_;

}  // namespace

Tensor random_rows(std::int64_t rows, std::int64_t columns, double deviation, std::uint64_t seed) {
  Tensor t = must(Tensor::uninitialized(DType::kBF16, {rows, columns}), "rows");
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0.0F, static_cast<float>(deviation));
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const float x = normal(rng);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &x, 4);
    t.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  return t;
}

void prepare_layer_weights() { Source::prepare(); }

MoeLayerWeights layer_weights(const Settings& s, const ParallelConfig& parallel) {
  MoeLayerWeights w;
  w.spec.hidden_size = kHidden;
  w.spec.intermediate_size = kInner;
  w.spec.num_experts = w.spec.routing.num_experts = s.experts;
  w.spec.routing.top_k = kTopK;
  w.spec.routing.renormalize = true;
  w.spec.routing.routed_scaling_factor = 2.5;
  w.spec.quant = must(quant_scheme_from_name("fp8-block"), "scheme");
  w.tensors.gate_weight = random_rows(s.experts, kHidden, 2 / std::sqrt(double{kHidden}), 99);
  w.experts = std::make_unique<Source>(must(local_expert_ids(s.experts, parallel), "experts"));
  return w;
}

namespace {

struct Variant {
  const char* name;
  RankTransport transport;
  RankReduction reduction;
  DType combine;
  double bound;  // relative L2 against one GPU; 0: the same bits
};
constexpr Variant kVariants[] = {
    {"all_to_all, fp32 back", RankTransport::kAllToAll, RankReduction::kPerRank, DType::kF32, 1e-6},
    {"all_to_all, bf16 back", RankTransport::kAllToAll, RankReduction::kPerRank, DType::kBF16,
     0x1p-8},
    {"all_to_all, per slot", RankTransport::kAllToAll, RankReduction::kPerSlot, DType::kF32, 0},
    {"gather, fp32 back", RankTransport::kGather, RankReduction::kPerRank, DType::kF32, 1e-6}};

double relative_l2(const std::vector<float>& got, const std::vector<float>& want) {
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = double{got[i]} - double{want[i]};
    diff += d * d;
    norm += double{want[i]} * double{want[i]};
  }
  return norm > 0 && std::isfinite(diff) ? std::sqrt(diff / norm) : INFINITY;
}

}  // namespace

LayerCall::LayerCall(const Tensor& host)
    : rows(host.shape()[0]),
      x(static_cast<std::size_t>(host.bytes())),
      y(static_cast<std::size_t>(rows * kHidden * 4)) {
  must(cudaMemcpy(x.as(), host.data(), static_cast<std::size_t>(host.bytes()),
                  cudaMemcpyHostToDevice),
       "rows");
}
void LayerCall::enqueue(const FusedMoE& layer, cudaStream_t stream) const {
  must(layer.enqueue({stream}, {x.as(), DType::kBF16, Shape{rows, kHidden}, layer.device()},
                     TensorView(y.as(), DType::kF32, Shape{rows, kHidden}, layer.device())),
       "layer");
}
void LayerCall::run(const FusedMoE& layer) const {
  enqueue(layer, nullptr);
  must(cudaDeviceSynchronize(), "layer");
}

bool check_layer(std::vector<Rank>& ranks, const Settings& s) {
  const std::size_t n = ranks.size();
  prepare_layer_weights();
  FusedMoE::Options options;
  options.max_tokens = s.check_tokens;
  std::vector<Tensor> rows;
  for (std::size_t r = 0; r < n; ++r) {
    // Uneven: the last rank has a third of the rows.
    rows.push_back(random_rows(r + 1 == n ? s.check_tokens / 3 : s.check_tokens, kHidden, 1.0, r));
  }
  std::vector<std::vector<float>> want(n);
  {
    options.device = Device::cuda(ranks[0].device);
    must(cudaSetDevice(ranks[0].device), "device");
    const FusedMoE one = must(FusedMoE::create(layer_weights(s, {}), options), "layer on one GPU");
    for (std::size_t r = 0; r < n; ++r) {
      const LayerCall call(rows[r]);
      call.run(one);
      want[r] = call.output();
    }
  }
  bool right = true;
  for (const Variant& v : kVariants) {
    std::vector<double> error(n);
    std::vector<char> same(n);
    Stopwatch watch(n);
    on_ranks(ranks, [&](Rank& r) {
      FusedMoE::Options o = options;
      o.device = Device::cuda(r.device);
      o.ranks.communicator = r.nccl;
      o.parallel.ep_size = o.parallel.dp_size = static_cast<int>(n);
      o.parallel.ep_rank = o.parallel.dp_rank = r.index;
      o.ranks.transport = v.transport;
      o.ranks.reduction = v.reduction;
      o.ranks.combine_dtype = v.combine;
      const FusedMoE layer = must(FusedMoE::create(layer_weights(s, o.parallel), o), "layer");
      const auto i = static_cast<std::size_t>(r.index);
      const LayerCall call(rows[i]);
      call.run(layer);
      watch.run(r, std::min(s.repeats, 10), [&] { call.run(layer); });
      const std::vector<float> got = call.output();
      error[i] = relative_l2(got, want[i]);
      same[i] = std::memcmp(got.data(), want[i].data(), got.size() * 4) == 0 ? 1 : 0;
    });
    const double worst = *std::max_element(error.begin(), error.end());
    const bool bits = std::count(same.begin(), same.end(), 1) == std::ssize(same);
    const bool ok = v.bound == 0 ? bits : worst <= v.bound;
    right = right && ok;
    fmt::print(
        "layer, {}: rel. L2 against one GPU {:.2e}{}, {:.0f} us with {} tokens per GPU: {}\n",
        v.name, worst, bits ? " (the same bits)" : "", watch.median_us(), s.check_tokens,
        ok ? "ok" : "WRONG");
    std::fflush(stdout);
  }
  return right;
}

}  // namespace moesaic::bench
