// Dispatch and combine between GPUs by themselves, beside the bandwidth of the link.
#include <algorithm>
#include <random>

#include "moesaic/activation.h"
#include "moesaic/modular_kernel.h"
#include "moesaic/parallel.h"
#include "moesaic/quant.h"
#include "nccl_ranks.h"

namespace moesaic::bench {

std::vector<std::int32_t> uniform_ids(std::int64_t tokens, int experts, std::uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int32_t> row;
    while (std::ssize(row) < kTopK) {
      const auto e = static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(experts));
      if (std::find(row.begin(), row.end(), e) == row.end()) row.push_back(e);
    }
    ids.insert(ids.end(), row.begin(), row.end());
  }
  return ids;
}

MoeProblem transport_problem(const Settings& s, std::int64_t ranks, std::int64_t tokens,
                             Device device) {
  MoeProblem p;
  p.num_experts = s.experts;
  p.num_local_experts = s.experts / ranks;
  p.top_k = kTopK;
  p.hidden_size = kHidden;
  p.intermediate_size = kInner;
  p.activation = must(make_activation("silu"), "activation");
  p.quant = must(quant_scheme_from_name("fp8-block"), "scheme");
  p.activation_dtype = DType::kBF16;
  p.max_tokens = tokens * ranks;
  p.device = device;
  return p;
}

namespace {

void time_one(std::vector<Rank>& ranks, const Settings& s, std::int64_t tokens, bool fp8,
              double link) {
  const std::size_t n = ranks.size();
  Stopwatch there(n), back(n);
  std::vector<double> out(n), in(n);
  on_ranks(ranks, [&](Rank& r) {
    AllToAllOptions o;
    o.parallel.ep_size = o.parallel.dp_size = static_cast<int>(n);
    o.parallel.ep_rank = o.parallel.dp_rank = r.index;
    o.max_tokens_per_rank = tokens;
    o.quantize_before_dispatch = fp8;
    o.combine_dtype = DType::kBF16;
    const Device device = Device::cuda(r.device);
    const auto transport =
        must(make_all_to_all_prepare_finalize(
                 transport_problem(s, static_cast<std::int64_t>(n), tokens, device), r.nccl, o),
             "transport");
    const DeviceArray x(static_cast<std::size_t>(tokens * kHidden * 2));
    must(cudaMemset(x.as(), 0x3F, static_cast<std::size_t>(tokens * kHidden * 2)), "rows");
    const DeviceArray ids(uniform_ids(tokens, s.experts, 7 + static_cast<std::uint64_t>(r.index)));
    const DeviceArray weights(std::vector<float>(static_cast<std::size_t>(tokens * kTopK), 0.1F));
    const DeviceArray sum(static_cast<std::size_t>(tokens * kHidden * 4));
    const auto view = [&](const DeviceArray& a, DType dtype, std::int64_t columns) {
      return TensorView(a.as<std::byte>(), dtype, {tokens, columns}, device);
    };
    PrepareArgs rows;
    rows.hidden_states = view(x, DType::kBF16, kHidden);
    rows.topk_ids = view(ids, DType::kI32, kTopK);
    rows.topk_weights = view(weights, DType::kF32, kTopK);
    FinalizeArgs answers;
    answers.output = view(sum, DType::kF32, kHidden);
    const auto dispatch = [&] {
      must(transport->prepare(rows).status(), "dispatch");
      must(cudaDeviceSynchronize(), "dispatch");
    };
    const auto combine = [&] {
      must(transport->finalize(answers), "combine");
      must(cudaDeviceSynchronize(), "combine");
    };
    const auto sent = [&](const auto& body) {
      const std::int64_t before = r.nccl->bytes_sent();
      body();
      return static_cast<double>(r.nccl->bytes_sent() - before);
    };
    const auto i = static_cast<std::size_t>(r.index);
    for (int warm = 0; warm < 3; ++warm) {
      out[i] = sent(dispatch);
      in[i] = sent(combine);
    }
    for (int repeat = 0; repeat < s.repeats; ++repeat) {
      there.run(r, 1, dispatch);
      back.run(r, 1, combine);
    }
  });
  const double a = there.median_us(), b = back.median_us();
  const double most_out = *std::max_element(out.begin(), out.end());
  const double most_in = *std::max_element(in.begin(), in.end());
  const auto gbps = [](double bytes, double us) { return bytes / us * 1e-3; };
  fmt::print(
      "| {} | {} | {} | {:.2f} | {:.0f} | {:.0f} | {:.0f} % | {:.2f} | {:.0f} | {:.0f} | "
      "{:.0f} % |\n",
      n, tokens, fp8 ? "fp8" : "bf16", most_out * 1e-6, a, gbps(most_out, a),
      100 * gbps(most_out, a) / link, most_in * 1e-6, b, gbps(most_in, b),
      100 * gbps(most_in, b) / link);
  std::fflush(stdout);
}

}  // namespace

void time_transport(std::vector<Rank>& ranks, const Settings& s, double link) {
  fmt::print(
      "\nE {}, k {}, H {}, uniform routing; dispatch: lists, quantisation, packing, NCCL, "
      "unpacking; "
      "results back in bf16 and their sum; median of {}; % of {:.0f} GB/s\n"
      "| GPUs | tokens per GPU | rows | dispatch MB out | us | GB/s | of the link | combine MB out "
      "| us | GB/s | of the link |\n|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|\n",
      s.experts, kTopK, kHidden, s.repeats, link);
  for (const std::int64_t tokens : s.tokens) {
    for (const bool fp8 : {true, false}) time_one(ranks, s, tokens, fp8, link);
  }
}

}  // namespace moesaic::bench
