#include "support/experts_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "support/random.h"

namespace moesaic::test {
namespace {

template <class T>
T must(Result<T> result, std::string_view what) {
  if (!result.ok()) {
    fmt::print(stderr, "{}: {}\n", what, result.status().to_string());
    std::abort();
  }
  return std::move(result).value();
}

// A named scheme with e4m3 weights in blocks of another size: "fp8-block-48x80", "fp8-bf16-64x32".
std::optional<Scheme> with_any_block(std::string_view name) {
  const std::size_t dash = name.rfind('-'), cross = name.rfind('x');
  if (!name.starts_with("fp8-b") || cross == std::string_view::npos || cross < dash) return {};
  const auto number = [&](std::size_t from, std::size_t to) {
    return std::stoll(std::string(name.substr(from, to - from)));
  };
  const Scheme near = must(quant_scheme_from_name(name.substr(0, dash)), "scheme_called");
  OperandQuant w = near.weight, a = near.activation;
  w.block_n = number(dash + 1, cross);
  w.block_k = number(cross + 1, name.size());
  if (!near.weight_only()) a.block_k = w.block_k;
  return make_scheme(near.name, w, a, near.output_bound);
}

}  // namespace

Scheme scheme_called(std::string_view name) {
  if (const std::optional<Scheme> scheme = with_any_block(name)) return *scheme;
  // "awq-int8": weights of another of these names, activations in int8 per group.
  constexpr std::string_view kInt8 = "-int8";
  if (name.ends_with(kInt8) && !quant_scheme_from_name(name).ok()) {
    const Scheme stored = scheme_called(name.substr(0, name.size() - kInt8.size()));
    return with_stored_weight(
        must(quant_scheme_from_name(int8_group_scheme_of(stored.weight)), "scheme_called"),
        stored.weight, stored.forms);
  }
  // Matrices of two types, each in its own form.
  if (name == "q4k-q6k" || name == "q4k-q5k" || name == "q4k-q50" || name == "q4k-q80" ||
      name == "q2k-q3k" || name == "q3k-q4k" || name == "q3k-q5k" || name == "q5k-q6k" ||
      name == "q40-q80") {
    const auto stored = [](std::string_view called) {
      for (const Scheme& s : stored_schemes()) {
        if (s.name == called) return s.weight;
      }
      return OperandQuant();
    };
    const OperandQuant q5k = scheme_called("q5k-super").weight;
    OperandQuant w = stored("q4_k_m");  // of any of the k types
    MatrixForms forms = {stored("q4_k"), stored("q6_k")};
    if (name == "q4k-q5k") {
      forms.w2 = q5k;
      w.block_k = 32;
    }
    if (name == "q5k-q6k") forms.w13 = q5k;
    if (name == "q2k-q3k") forms = {stored("q2_k"), stored("q3_k")};
    if (name == "q3k-q4k") forms = {stored("q3_k"), stored("q4_k")};
    if (name == "q3k-q5k") forms = {stored("q3_k"), stored("q5_k")};
    if (name == "q4k-q50" || name == "q4k-q80") {
      forms.w13.super_bits = 0;  // of both types together
      forms.w2 = stored("q8_0");
      forms.w2.scale_dtype = DType::kF32;
      if (name == "q4k-q50") forms.w2.code_bits = 6;
      w = forms.w2;
      w.zero_point = ZeroPoint::kMin;
    }
    if (name == "q40-q80") {
      forms = {stored("q4_0"), stored("q8_0")};
      w = forms.w2;
    }
    Scheme scheme = with_weight(must(quant_scheme_from_name("int8-bf16"), "scheme_called"), w);
    scheme.forms = forms;
    return scheme;
  }
  // "q4k-super": the same with scales (and codes of 8 bits) as the k types of GGUF files have them.
  constexpr std::string_view kSuper = "-super";
  if (name.ends_with(kSuper)) {
    Scheme scheme = scheme_called(name.substr(0, name.size() - kSuper.size()));
    OperandQuant w = scheme.weight;
    const bool minima = w.dtype == DType::kU4 && w.zero_point == ZeroPoint::kMin;
    w.super_bits = (minima || w.block_k == 32) && w.table == CodeTable::kNone ? 6 : 8;
    if (w.dtype == DType::kI8) w.code_bits = 6;
    return with_weight(scheme, w);
  }
  // "int4-g32-f16", "awq-f16": the same with scales that are numbers of F16.
  constexpr std::string_view kF16 = "-f16", kBF16 = "-bf16s";
  for (const auto& [end, dtype] : {std::pair{kF16, DType::kF16}, std::pair{kBF16, DType::kBF16}}) {
    if (!name.ends_with(end)) continue;
    const Scheme scheme = scheme_called(name.substr(0, name.size() - end.size()));
    OperandQuant w = scheme.weight;
    w.scale_dtype = dtype;
    return with_weight(scheme, w);
  }
  std::string_view named = name;  // the nearest one
  if (name == "fp8-static") named = "fp8-tensor";
  if (name == "int4-fp8-static" || name == "int4-fp8-g32" || name == "int4-fp8-g96") {
    named = "int4-fp8";
  }
  if (name == "mxfp4-static" || name == "mxfp4-token" || name == "mxfp4-f32-groups") {
    named = "mxfp4-fp8";
  }
  if (name == "mxfp8-bf16") named = "mxfp8";
  if (name == "gptq" || name == "q4k" || name == "q2k" || name == "q3k" || name == "awq" ||
      name == "int4-g32") {
    named = "int4-g128";
  }
  if (name == "int4-channel" || name == "q5k" || name == "q6k" || name == "q4k-m" ||
      name == "u8-zero") {
    named = "int8-bf16";
  }
  if (name == "nvfp4-rows") named = "nvfp4";
  if (name == "fp4-bf16" || name == "iq4") named = "nf4-bf16";
  const Scheme near = must(quant_scheme_from_name(named), "scheme_called");
  OperandQuant w = near.weight, a = near.activation;
  if (name == "mxfp4-f32-groups" || name == "mxfp4-static" || name == "mxfp4-token") {
    a.scale_format = ScaleFormat::kF32;
  }
  if (name == "mxfp4-token") {
    a.granularity = ScaleGranularity::kToken;
    a.block_n = a.block_k = 0;
  }
  if (name == "fp8-static" || name == "mxfp4-static" || name == "int4-fp8-static") {
    a.granularity = ScaleGranularity::kTensor;
    a.block_n = a.block_k = 0;
    a.dynamic = false;
  }
  if (name == "gptq" || name == "q4k") {
    w.dtype = DType::kU4;
    w.block_k = 32;
    w.zero_point = name == "gptq" ? ZeroPoint::kInteger : ZeroPoint::kMin;
    w.act_order = name == "gptq";
  }
  if (name == "mxfp8-bf16") a = OperandQuant();
  if (name == "awq") {
    w.dtype = DType::kU4;
    w.block_k = 64;
    w.zero_point = ZeroPoint::kInteger;
  }
  if (name == "int4-fp8-g32" || name == "int4-g32") w.block_k = 32;
  if (name == "int4-fp8-g96") w.block_k = 96;
  if (name == "q2k" || name == "q3k") w.block_k = 16;
  if (name == "q2k") {
    w.dtype = DType::kU4;
    w.zero_point = ZeroPoint::kMin;
  }
  if (name == "int4-channel") w.dtype = DType::kI4;
  if (name == "q5k" || name == "q6k" || name == "q4k-m") {
    w.granularity = ScaleGranularity::kGroup;
    w.block_n = 1;
    w.block_k = name == "q5k" ? 32 : 16;
    if (name != "q6k") w.zero_point = ZeroPoint::kMin;
  }
  if (name == "u8-zero") {
    w.dtype = DType::kU8;
    w.zero_point = ZeroPoint::kInteger;
  }
  if (name == "nvfp4-rows") w.outer_scale = OuterScale::kChannel;
  if (name == "fp4-bf16") w.table = CodeTable::kFp4;
  if (name == "iq4") {
    w.table = CodeTable::kIq4Nl;
    w.block_k = 32;
  }
  return make_scheme(near.name, w, a, near.output_bound);
}

MoeProblem small_problem(std::string_view quant) {
  MoeProblem p;
  p.num_experts = 6;
  p.num_local_experts = 6;
  p.top_k = 2;
  p.quant = scheme_called(quant);
  const bool wide = p.quant.weight.dtype == DType::kF8E4M3 || p.quant.weight.block_k >= 64 ||
                    p.quant.activation.block_k >= 64;
  p.hidden_size = wide ? 256 : 96;
  p.intermediate_size = wide ? 128 : 64;
  p.activation_dtype = quant == "f16" ? DType::kF16 : DType::kBF16;
  p.max_tokens = 16;
  p.num_threads = 1;  // tests share the machine; thread counts are compared where it matters
  return p;
}

std::vector<double> StandardCase::oracle(bool round_like_scheme) const {
  return oracle_moe(problem, weights.view(), hidden_states.view(), routing.ids.view(),
                    routing.weights.view(), expert_map, {round_like_scheme});
}

StandardCase make_case(std::uint64_t seed, const MoeProblem& problem, std::int64_t tokens,
                       DType dtype, double invalid_slots) {
  StandardCase c;
  c.problem = problem;
  c.problem.max_tokens = std::max<std::int64_t>(tokens, 1);
  c.weights = random_expert_weights(seed, problem);
  c.routing = random_routing(seed + 1, tokens, problem.num_experts, problem.top_k, invalid_slots);
  Rng rng(seed + 2);
  c.hidden_states = random_normal(rng, dtype, {tokens, problem.hidden_size});
  return c;
}

std::unique_ptr<Experts> make_backend(std::string_view name, const StandardCase& c) {
  const ExpertsBackend* row = must(choose_experts(c.problem, name), "make_backend");
  const auto source = make_stacked_source(c.weights.view());
  return must(row->create(c.problem, *source), "make_backend");
}

Tensor poisoned_bytes(std::int64_t bytes) {
  Tensor t = must(Tensor::uninitialized(DType::kU8, {bytes}), "poisoned_bytes");
  poison(t.view());
  return t;
}

Tensor run_standard(const Experts& experts, const StandardCase& c, DType output_dtype) {
  Tensor workspace =
      poisoned_bytes(must(experts.workspace_size(c.hidden_states.shape()[0]), "workspace_size"));
  Tensor output = must(Tensor::uninitialized(output_dtype, c.hidden_states.shape()), "output");
  poison(output.view());
  ExpertsArgs args;
  args.hidden_states = c.hidden_states.view();
  args.topk_ids = c.routing.ids.view();
  args.topk_weights = c.routing.weights.view();
  args.expert_map = c.expert_map;
  args.workspace = {workspace.data(), static_cast<std::size_t>(workspace.bytes())};
  args.output = output.view();
  const Status status = experts.run(args);
  if (!status.ok()) {
    fmt::print(stderr, "run_standard: {}\n", status.to_string());
    std::abort();
  }
  return output;
}

}  // namespace moesaic::test
