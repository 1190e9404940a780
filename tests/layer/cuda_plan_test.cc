// What of a layer a GPU takes, and explain's rows for it: no device needed, in any build.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "layer/layer_case.h"
#include "layer/sm90/layer.h"
#include "layer/sm90/prologue_plan.h"
#include "moesaic/communicator.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;
using test::on_gpu;
using test::small_spec;

const CandidateReport* find(const LayerExplanation& e, const std::string& stage,
                            const std::string& name) {
  for (const CandidateReport& row : e.candidates) {
    if (row.stage == stage && row.name == name) return &row;
  }
  return nullptr;
}

MoeLayerSpec deepseek_v3() {
  MoeLayerSpec spec = small_spec();
  spec.hidden_size = 7168;
  spec.intermediate_size = 2048;
  spec.num_experts = spec.routing.num_experts = 256;
  spec.routing.top_k = 8;
  test::use_grouped_routing(spec.routing, 8, 4);
  spec.shared.intermediate_size = 2048;
  spec.quant = quant_scheme_from_name("fp8-block").value();
  return spec;
}

TEST(CudaPlan, ExplainListsTheGpuAndRefusesTheCpuOnAGpu) {
  const LayerExplanation e = explain_layer(small_spec(), on_gpu()).value();
  EXPECT_EQ(e.experts_backend, "cuda_sm90");
  EXPECT_NE(e.determinism.find("cuda_sm90"), std::string::npos);
  EXPECT_GT(e.workspace_bytes, 0);
  ASSERT_NE(find(e, "experts", "cuda_sm90"), nullptr);
  EXPECT_TRUE(find(e, "experts", "cuda_sm90")->accepted);
  const CandidateReport* reference = find(e, "experts", "cpu_reference");
  ASSERT_NE(reference, nullptr);
  EXPECT_FALSE(reference->accepted);
  EXPECT_NE(reference->reason.find("cuda:0"), std::string::npos);
  for (const CandidateReport& row : e.candidates) {
    EXPECT_EQ(row.accepted, row.reason.empty()) << row.stage << ' ' << row.name;
  }
  const auto accepted_router =
      std::find_if(e.candidates.begin(), e.candidates.end(),
                   [](const CandidateReport& r) { return r.stage == "router" && r.accepted; });
  ASSERT_NE(accepted_router, e.candidates.end());
  EXPECT_EQ(accepted_router->name.rfind("cuda_", 0), 0U) << accepted_router->name;
}

TEST(CudaPlan, ExplainOnTheCpuSaysWhatTheGpuNeeds) {
  const LayerExplanation e = explain_layer(small_spec(), {}).value();
  const CandidateReport* gpu = find(e, "experts", "cuda_sm90");
  ASSERT_NE(gpu, nullptr);
  EXPECT_FALSE(gpu->accepted);
  EXPECT_NE(gpu->reason.find("device: cpu"), std::string::npos) << gpu->reason;
}

TEST(CudaPlan, GateKernelsFollowTokensShapeAndDType) {
  const auto kernels = [](const MoeLayerSpec& spec, const FusedMoE::Options& options) {
    std::string names;
    const LayerExplanation e = explain_layer(spec, options).value();
    for (const CandidateReport& r : e.candidates) {
      if (r.stage == "gate" && r.accepted) names += r.name + " ";
    }
    return names;
  };
  EXPECT_EQ(kernels(deepseek_v3(), on_gpu(16)), "sm90_gate_one_wave ");
  EXPECT_EQ(kernels(deepseek_v3(), on_gpu(64)), "sm90_gate_resident_weights sm90_gate_one_wave ");
  EXPECT_EQ(kernels(deepseek_v3(), on_gpu(129)),
            "sm90_gate_tiled_pipeline sm90_gate_one_wave sm90_gate_resident_weights ");
  // A kernel that only longer calls would take says from how many tokens on.
  const LayerExplanation short_calls = explain_layer(deepseek_v3(), on_gpu(16)).value();
  EXPECT_EQ(find(short_calls, "gate", "sm90_gate_tiled_pipeline")->reason,
            "max_tokens: got 16, need 83 or more");
  EXPECT_NE(find(short_calls, "gate", "sm90_gate_fp32_rows")->reason.find("[256, 3072]"),
            std::string::npos);
  // A CPU has none of them, but its own tiers; neither has those of the other.
  const std::string on_cpu = kernels(small_spec(), {});
  EXPECT_EQ(on_cpu.find("sm90"), std::string::npos) << on_cpu;
  EXPECT_NE(on_cpu.find("cpu_baseline "), std::string::npos) << on_cpu;
}

TEST(CudaPlan, WorkspaceOfDeepSeekV3Fits) {
  const std::int64_t bytes = explain_layer(deepseek_v3(), on_gpu(8192))->workspace_bytes;
  EXPECT_LE(bytes, 1'200'000'000) << "for 8192 tokens";
  EXPECT_GE(bytes, 900'000'000) << "less than the expert rows alone: something is missing";
}

TEST(CudaPlan, RefusalsNameTheStage) {
  FusedMoE::Options options = on_gpu();
  MoeLayerSpec many = small_spec();
  many.num_experts = many.routing.num_experts = 2048;
  expect_refusal(explain_layer(many, options).status(), StatusCode::kUnsupported,
                 {"num_experts: got 2048"});
  options.quant = "mxfp4-fp8";
  options.activation_scales = ScaleFormat::kF32;
  EXPECT_EQ(explain_layer(small_spec(), options)->experts_backend, "cuda_general");
  options.backend = "cuda_sm90";
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kUnsupported,
                 {"experts", "cuda_sm90", "mxfp4-fp8"});
  options = on_gpu();
  options.backend = "cpu_reference";
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kUnsupported,
                 {"cpu_reference", "cuda_sm90"});
  options = on_gpu();
  options.transform.hidden_size = 64;
  options.transform.input = [](ConstTensorView, TensorView) { return Status(); };
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kUnsupported,
                 {"transform"});
  MoeLayerSpec custom = small_spec();
  custom.routing.method = RoutingMethod::kCustom;
  options = on_gpu();
  options.custom_routing = [](ConstTensorView, ConstTensorView, bool, TensorView, TensorView) {
    return Status();
  };
  expect_refusal(explain_layer(custom, options).status(), StatusCode::kUnsupported,
                 {"custom_routing", "cuda:0", "on_device.custom_routing"});
  MoeLayerSpec best_two = small_spec();
  test::use_grouped_routing(best_two.routing, 4, 2);
  best_two.routing.group_by_best_two = true;
  EXPECT_TRUE(explain_layer(best_two, on_gpu()).ok());
  best_two.routing.has_correction_bias = false;
  EXPECT_TRUE(explain_layer(best_two, on_gpu()).ok());
  MoeLayerSpec scaled = small_spec();
  scaled.routing.has_expert_scale = true;
  EXPECT_TRUE(explain_layer(scaled, on_gpu()).ok());
  MoeLayerSpec normed = small_spec();
  normed.input_norm_eps = 1e-6;
  EXPECT_TRUE(explain_layer(normed, on_gpu()).ok());
  options = on_gpu();
  options.backend = "cuda_sm90";
  MoeLayerSpec odd = small_spec();
  odd.hidden_size = 70;
  expect_refusal(explain_layer(odd, options).status(), StatusCode::kUnsupported,
                 {"experts", "hidden_size: got 70"});
}

// Sizes and dtypes that the fast kernel passes over have the general one; explain says why.
TEST(CudaPlan, TheGeneralExpertsTakeWhatTheFastOnesPassOver) {
  MoeLayerSpec odd = small_spec();
  odd.hidden_size = 70;
  LayerExplanation e = explain_layer(odd, on_gpu()).value();
  EXPECT_EQ(e.experts_backend, "cuda_general");
  EXPECT_NE(e.determinism.find("cuda_general"), std::string::npos) << e.determinism;
  EXPECT_EQ(find(e, "experts", "cuda_sm90")->reason, "hidden_size: got 70, need a multiple of 8");
  EXPECT_TRUE(find(e, "experts", "cuda_general")->accepted);
  for (const char* quant : {"f32", "f16"}) {
    FusedMoE::Options options = on_gpu();
    options.quant = quant;
    const bool fast = std::string_view(quant) == "f16";
    e = explain_layer(test::with_shared(true), options).value();
    EXPECT_EQ(e.experts_backend, fast ? "cuda_sm90" : "cuda_general") << quant;
    // Over ranks rows travel as they are, and what slots leave too.
    options.ranks.communicator = std::move(make_in_process_communicators(2).value().front());
    options.parallel.ep_size = options.parallel.dp_size = 2;
    for (const RankReduction reduction : {RankReduction::kPerRank, RankReduction::kPerSlot}) {
      options.ranks.reduction = reduction;
      EXPECT_EQ(explain_layer(small_spec(), options)->experts_backend,
                fast ? "cuda_sm90" : "cuda_general")
          << quant;
    }
  }
  FusedMoE::Options forced = on_gpu();
  forced.backend = "cuda_general";
  EXPECT_EQ(explain_layer(small_spec(), forced)->experts_backend, "cuda_general");
  // A shared expert among the routed ones would need the fast kernel.
  MoeLayerSpec alike = small_spec();
  alike.shared.intermediate_size = alike.intermediate_size;
  const auto joins = [&](const FusedMoE::Options& o) {
    return cuda::shared_joins(layer::plan_fused_moe(alike, alike.quant, o).value(), false);
  };
  EXPECT_TRUE(joins(on_gpu()));
  EXPECT_FALSE(joins(forced));
  alike.quant = quant_scheme_from_name("f16").value();
  alike.activation_dtype = DType::kF16;
  EXPECT_TRUE(joins(on_gpu()));
}

// A caller's function is the host's or the device's, as the layer is.
TEST(CudaPlan, FunctionsAreForTheDeviceOfTheLayer) {
  const auto copies = [](Stream, ConstTensorView, TensorView) { return Status(); };
  MoeLayerSpec custom = small_spec();
  custom.routing.method = RoutingMethod::kCustom;
  FusedMoE::Options options = on_gpu();
  options.on_device.custom_routing = [](Stream, ConstTensorView, ConstTensorView, bool, TensorView,
                                        TensorView) { return Status(); };
  const LayerExplanation e = explain_layer(custom, options).value();
  ASSERT_NE(find(e, "router", "cuda_custom"), nullptr);
  EXPECT_TRUE(find(e, "router", "cuda_custom")->accepted);
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kInvalidArgument,
                 {"custom_routing: got one"});
  expect_refusal(explain_layer(custom, on_gpu()).status(), StatusCode::kInvalidArgument,
                 {"custom_routing: got none"});
  options = on_gpu();
  options.on_device.routed_input = options.on_device.routed_output = copies;
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kInvalidArgument,
                 {"transform.hidden_size"});
  const std::int64_t plain = explain_layer(small_spec(), on_gpu())->workspace_bytes;
  options.transform.hidden_size = 48;
  EXPECT_GT(explain_layer(small_spec(), options)->workspace_bytes, plain);
  // Routed experts of another width than the rows', and a shared one of theirs: apart from them.
  MoeLayerSpec alike = small_spec();
  alike.shared.intermediate_size = alike.intermediate_size;
  options.transform.hidden_size = 64;
  EXPECT_FALSE(cuda::shared_joins(layer::plan_fused_moe(alike, {}, options).value(), false));
  EXPECT_TRUE(
      cuda::shared_joins(layer::plan_fused_moe(alike, alike.quant, on_gpu()).value(), false));
  for (const int which : {0, 1, 2}) {
    FusedMoE::Options host;
    host.transform.hidden_size = which < 2 ? 64 : 0;
    if (which == 0) host.on_device.routed_input = copies;
    if (which == 1) host.on_device.routed_output = copies;
    if (which == 2) host.on_device.shared_experts = copies;
    expect_refusal(explain_layer(small_spec(), host).status(), StatusCode::kUnsupported,
                   {"on_device.", "cpu", which == 2 ? "need shared_experts" : "need transform."});
  }
  options = on_gpu();
  options.shared_experts = [](ConstTensorView, TensorView) { return Status(); };
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kUnsupported,
                 {"shared_experts", "need on_device.shared_experts"});
  options = on_gpu();
  options.on_device.capture = [](Stream, ConstTensorView) { return Status(); };
  EXPECT_TRUE(explain_layer(small_spec(), options).ok());
  options.device = Device::cpu();
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kUnsupported,
                 {"on_device.capture", "need capture"});
  options = on_gpu();
  options.capture = [](ConstTensorView) {};
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kUnsupported,
                 {"capture", "need on_device.capture"});
}

// Memory for both streams, and a word about it; a joined shared expert has no stream of its own.
TEST(CudaPlan, ASecondStreamForSharedExperts) {
  FusedMoE::Options options = on_gpu();
  const LayerExplanation one = explain_layer(test::with_shared(true), options).value();
  EXPECT_NE(one.stage_order.find("one after the other on one stream"), std::string::npos);
  options.shared_stream = true;
  const LayerExplanation two = explain_layer(test::with_shared(true), options).value();
  EXPECT_NE(two.stage_order.find("shared_experts meanwhile, on a second stream"), std::string::npos)
      << two.stage_order;
  EXPECT_GT(two.workspace_bytes, one.workspace_bytes);
  MoeLayerSpec alike = test::with_shared(false);
  alike.shared.intermediate_size = alike.intermediate_size;
  EXPECT_NE(explain_layer(alike, options)->stage_order.find("as one more of them"),
            std::string::npos);
  EXPECT_TRUE(explain_layer(small_spec(), options).ok());
  options.device = Device::cpu();
  expect_refusal(explain_layer(small_spec(), options).status(), StatusCode::kUnsupported,
                 {"shared_stream", "on the CPU"});
}

// A device that is not there, or a build without CUDA: a Status, and enqueue says so on the CPU.
TEST(CudaPlan, ALayerForAMissingDeviceIsRefused) {
  const test::LayerTensors t = test::make_tensors(1, small_spec());
  FusedMoE::Options options;
  options.device = Device::cuda(99);
  const auto layer = FusedMoE::create(t.weights(), options);
  ASSERT_FALSE(layer.ok());
  EXPECT_EQ(layer.status().to_string(), check_device(options.device).to_string());
  const Tensor x = test::random_hidden(1, 2, 64);
  Tensor y = Tensor::zeros(DType::kBF16, {2, 64}).value();
  expect_refusal(test::make_layer(t).enqueue({}, x.view(), y.view()), StatusCode::kUnsupported,
                 {"CPU"});
}

// --- The experts' prologue ------------------------------------------------------------------------

TEST(CudaPlan, WhichKernelRunsTheExpertsPrologue) {
  using cuda::ProloguePlace;
  const auto chosen = [](bool has, bool gate, bool moves, bool routes) {
    return cuda::choose_prologue_place({has, gate, moves, routes});
  };
  EXPECT_EQ(chosen(true, true, true, true), ProloguePlace::kInGate);
  EXPECT_EQ(chosen(true, false, true, true), ProloguePlace::kInRouter);
  EXPECT_EQ(chosen(true, true, false, true), ProloguePlace::kInRouter);
  EXPECT_EQ(chosen(true, true, true, false), ProloguePlace::kInRouter);
  EXPECT_EQ(chosen(false, true, true, true), ProloguePlace::kInExperts);
  cuda::ProloguePlan plan;
  plan.add(ProloguePlace::kInGate, ProloguePlace::kInRouter, ProloguePlace::kInExperts);
  plan.add(ProloguePlace::kInRouter, ProloguePlace::kInExperts, ProloguePlace::kInGate);
  EXPECT_EQ(plan.of(1, DType::kBF16), ProloguePlace::kInGate);
  EXPECT_EQ(plan.of(1, DType::kF16), ProloguePlace::kInRouter);
  EXPECT_EQ(plan.of(2, DType::kF32), ProloguePlace::kInGate);
  EXPECT_EQ(plan.of(2, DType::kBF16), ProloguePlace::kInRouter);
  for (const std::int64_t tokens : {0, 3, 1000}) {
    EXPECT_EQ(plan.of(tokens, DType::kBF16), ProloguePlace::kInExperts) << tokens;
  }
}

// --- Ranks ---------------------------------------------------------------------------------------

FusedMoE::Options on_two_gpus(const std::shared_ptr<Communicator>& communicator) {
  FusedMoE::Options o = on_gpu(64);
  o.ranks.communicator = communicator;
  o.parallel.ep_size = o.parallel.dp_size = 2;
  return o;
}

TEST(CudaPlan, RanksOnGpusTakeTheStandardTransports) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = on_two_gpus(pair);
  const LayerExplanation e = explain_layer(deepseek_v3(), o).value();
  EXPECT_EQ(e.experts_backend, "cuda_sm90");
  // Rows travel: the catalogue's transport, no longer the experts by themselves.
  EXPECT_TRUE(find(e, "prepare_finalize", "cuda_all_to_all")->accepted);
  EXPECT_EQ(find(e, "prepare_finalize", "cuda_in_experts")->reason,
            "transport: got all_to_all, need none");
  const LayerExplanation alone = explain_layer(deepseek_v3(), on_gpu(64)).value();
  EXPECT_TRUE(find(alone, "prepare_finalize", "cuda_in_experts")->accepted);
  EXPECT_FALSE(find(alone, "prepare_finalize", "cuda_all_to_all")->accepted);
  o.ranks.transport = RankTransport::kGather;
  EXPECT_TRUE(explain_layer(deepseek_v3(), o).ok());
  // Of several that could serve, the one that runs.
  const LayerExplanation gathers = explain_layer(deepseek_v3(), o).value();
  EXPECT_TRUE(find(gathers, "prepare_finalize", "cuda_all_gather_reduce_scatter")->accepted);
  EXPECT_EQ(find(gathers, "prepare_finalize", "cuda_all_to_all")->reason,
            "transport: got gather, need all_to_all");
  EXPECT_FALSE(find(e, "prepare_finalize", "cuda_all_gather_reduce_scatter")->accepted);
  o.ranks.combine_dtype = DType::kBF16;
  EXPECT_TRUE(explain_layer(deepseek_v3(), o).ok());
  o = on_two_gpus(pair);
  o.ranks.reduction = RankReduction::kPerSlot;
  EXPECT_TRUE(explain_layer(deepseek_v3(), o).ok());
  // Slots are no rows of their own on a GPU: the experts see all k of a row.
  const layer::FusedPlan plan = layer::plan_fused_moe(deepseek_v3(), {}, o).value();
  EXPECT_EQ(plan.routed.top_k, 8);
  EXPECT_EQ(plan.routed.max_tokens, 128);
  EXPECT_FALSE(cuda::shared_joins(plan, false)) << "the experts see the rows of other ranks";
}

TEST(CudaPlan, ExplainSaysWhichEngineMovesRows) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = on_two_gpus(pair);
  const auto row = [&](const char* name) {
    const LayerExplanation e = explain_layer(small_spec(), o).value();
    const CandidateReport* const found = find(e, "prepare_finalize", name);
    EXPECT_NE(found, nullptr) << name;
    return found != nullptr ? *found : CandidateReport();
  };
  EXPECT_EQ(row("cuda_peer_all_to_all").reason,
            "rank_engine: got messages, need peer_windows or auto");
  EXPECT_TRUE(row("cuda_all_to_all").accepted);
  o.ranks.engine = RankEngine::kAuto;
  EXPECT_TRUE(row("cuda_peer_all_to_all").accepted);
  EXPECT_TRUE(row("cuda_all_to_all").accepted);
  EXPECT_EQ(row("cuda_peer_gather").reason, "transport: got all_to_all, need gather");
  o.ranks.engine = RankEngine::kPeerWindows;
  EXPECT_TRUE(row("cuda_peer_all_to_all").accepted);
  EXPECT_EQ(row("cuda_all_to_all").reason, "rank_engine: got peer_windows, need messages or auto");
  o.ranks.transport = RankTransport::kGather;
  EXPECT_TRUE(row("cuda_peer_gather").accepted);
  // Ranks with the same rows: not through windows, and with auto by messages.
  o.parallel.tp_size = 1;
  o.parallel.dp_size = 1;
  o.ranks.transport = RankTransport::kAllToAll;
  expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported,
                 {"rank_engine: got peer_windows where 2 ranks have the same rows"});
  o.ranks.engine = RankEngine::kAuto;
  EXPECT_NE(row("cuda_peer_all_to_all").reason.find("2 ranks have the same rows"),
            std::string::npos);
}

TEST(CudaPlan, PeerWindowsAreForGpusAndForRowsThatTravel) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = on_two_gpus(pair);
  o.ranks.engine = RankEngine::kPeerWindows;
  o.device = Device::cpu();
  expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported,
                 {"rank_engine: got peer_windows on cpu"});
  o = on_two_gpus(pair);
  o.ranks.engine = RankEngine::kPeerWindows;
  o.parallel.dp_size = 1;
  o.ranks.transport = RankTransport::kNone;
  expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported,
                 {"rank_engine: got peer_windows with transport none"});
  EXPECT_EQ(rank_engine_name(RankEngine::kAuto), "auto");
}

// Where windows' memory is from is a question of windows only.
TEST(CudaPlan, PeerMemoryIsForPeerWindows) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  for (const PeerMemory memory : {PeerMemory::kNccl, PeerMemory::kCudaHandles}) {
    FusedMoE::Options o = on_two_gpus(pair);
    o.ranks.peer_memory = memory;
    const std::string got = "peer_memory: got " + std::string(peer_memory_name(memory));
    expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported,
                   {got.c_str(), "rank_engine: got messages"});
    for (const RankEngine engine : {RankEngine::kAuto, RankEngine::kPeerWindows}) {
      o.ranks.engine = engine;
      EXPECT_TRUE(explain_layer(small_spec(), o).ok());
    }
    o.device = Device::cpu();
    o.ranks.engine = RankEngine::kAuto;
    expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported,
                   {got.c_str(), "on cpu, need a GPU"});
    o = on_two_gpus(pair);
    o.ranks.peer_memory = memory;
    o.ranks.engine = RankEngine::kAuto;
    o.parallel.dp_size = 1;
    o.ranks.transport = RankTransport::kNone;
    expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported,
                   {got.c_str(), "with transport none"});
  }
}

// Room for fewer pairs than there may be: what cannot have it says so, before anybody waits.
TEST(CudaPlan, APairCapacityIsForPeerWindows) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  FusedMoE::Options o = on_two_gpus(pair);
  o.max_tokens = 4096;
  o.ranks.pair_capacity = 4000;
  expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported,
                 {"pair_capacity: got 4000", "got messages"});
  o.ranks.engine = RankEngine::kAuto;
  const std::int64_t few = explain_layer(small_spec(), o)->workspace_bytes;
  MoeLayerSpec wide = small_spec();
  wide.quant = quant_scheme_from_name("f32").value();
  expect_refusal(explain_layer(wide, o).status(), StatusCode::kUnsupported,
                 {"pair_capacity: got 4000, need experts cuda_sm90 (these are cuda_general)"});
  MoeLayerSpec ragged = small_spec();
  ragged.hidden_size = 60;
  EXPECT_FALSE(explain_layer(ragged, o).ok());
  o.ranks.pair_capacity = -1;
  expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kInvalidArgument,
                 {"pair_capacity: got -1, need >= 0"});
  o.ranks.pair_capacity = 0;
  EXPECT_GT(explain_layer(small_spec(), o)->workspace_bytes, few);
}

TEST(CudaPlan, WhatRanksOnGpusDoNotTakeIsRefusedByName) {
  const std::shared_ptr<Communicator> pair =
      std::move(make_in_process_communicators(2).value().front());
  const auto refused = [&](auto change, std::initializer_list<const char*> words) {
    FusedMoE::Options o = on_two_gpus(pair);
    change(o);
    expect_refusal(explain_layer(small_spec(), o).status(), StatusCode::kUnsupported, words);
  };
  refused(
      [](auto& o) {
        o.ranks.enable_eplb = true;
        o.ranks.communicator = nullptr;
      },
      {"enable_eplb: got true on a GPU without a communicator"});
  MoeLayerSpec normed = small_spec();
  normed.input_norm_eps = 1e-6;
  EXPECT_TRUE(explain_layer(normed, on_two_gpus(pair)).ok());
  normed.quant = quant_scheme_from_name("f32").value();
  expect_refusal(explain_layer(normed, on_two_gpus(pair)).status(), StatusCode::kUnsupported,
                 {"activation_dtype: got F32 with an input norm over ranks", "BF16"});
  const std::shared_ptr<Communicator> four =
      std::move(make_in_process_communicators(4).value().front());
  refused(
      [&](auto& o) {
        o.ranks.communicator = four;
        o.parallel.ep_size = 4;
        o.ranks.transport = RankTransport::kGather;
        o.ranks.reduction = RankReduction::kPerSlot;
      },
      {"reduction: got per_slot with transport gather", "2 ranks with the same rows",
       "all_to_all"});
}

}  // namespace
}  // namespace moesaic
