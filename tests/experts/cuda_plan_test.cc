// What the GPU backend decides on the host: builds, sizes, work list bounds. Needs neither CUDA nor
// a device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string_view>
#include <utility>

#include "experts/cuda_general/general_plan.h"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/experts_plan.h"
#include "numerics/float_codec.h"
#include "support/experts_run.h"
#include "support/refusal.h"

namespace moesaic::cuda {
namespace {

const TileRules& rules_of(std::string_view quant) {
  return format_of(test::small_problem(quant)).value()->tiles;
}
const TileRules& fp8_rules() { return rules_of("fp8-block"); }
const TileRules& bf16_rules() { return rules_of("bf16"); }

TEST(CudaPlan, GroupsGrowWithRowsPerExpert) {
  const auto columns = [](std::int64_t tokens) {
    return choose_grouped(fp8_rules(), EpilogueKind::kSwiglu, tokens, 8, 256, 16, {}).max_columns;
  };
  EXPECT_EQ(columns(1), 32);
  EXPECT_EQ(columns(256), 32);
  EXPECT_EQ(columns(512), 64);
  EXPECT_EQ(columns(1024), 64);
  EXPECT_EQ(columns(2048), 128);
  EXPECT_EQ(columns(8192), 128);
  EXPECT_EQ(choose_grouped(bf16_rules(), EpilogueKind::kPlain, 8192, 8, 8, 6, {}).max_columns, 32);
  // Rows that all go to one expert fill groups at once: a shared expert run by itself.
  EXPECT_EQ(choose_grouped(fp8_rules(), EpilogueKind::kSwiglu, 129, 1, 1, 16, {}).max_columns, 136);
}

// Experts of somewhat more rows than 128 are one group where there is a build for it.
TEST(CudaPlan, RowsOfOneGroupStayOne) {
  const auto columns = [](const char* quant, std::int64_t tokens) {
    return choose_grouped(rules_of(quant), EpilogueKind::kSwiglu, tokens, 8, 128, 6, {})
        .max_columns;
  };
  for (const std::string_view quant : {"fp8-block", "fp8-channel", "fp8-tensor", "int8"}) {
    const int snug = rules_of(quant).snug;
    EXPECT_EQ(snug, quant == "int8" ? 144 : 136);
    EXPECT_EQ(columns(quant.data(), 96 * 16), 128) << quant;
    EXPECT_EQ(columns(quant.data(), 97 * 16), snug) << quant;
    EXPECT_EQ(columns(quant.data(), snug * 16), snug) << quant;
    EXPECT_EQ(columns(quant.data(), snug * 16 + 1), 128) << quant;
  }
  EXPECT_EQ(columns("bf16", 2048), 128);
}

// Decoded weights have twice the warps in groups of 32 columns, and keep them for longer.
TEST(CudaPlan, DecodedWeightsStayInNarrowGroups) {
  const auto columns = [](const char* quant, std::int64_t tokens) {
    return choose_grouped(rules_of(quant), EpilogueKind::kSwiglu, tokens, 8, 128, 6, {})
        .max_columns;
  };
  for (const auto& [quant, middle] :
       {std::pair{"int4-g128", 48}, std::pair{"int4-g32", 48}, std::pair{"nf4-bf16", 48},
        std::pair{"nvfp4", 64}, std::pair{"mxfp4-bf16", 64}, std::pair{"mxfp8", 64},
        std::pair{"fp8-bf16", 64}, std::pair{"q4k", 48}, std::pair{"q5k", 64}}) {
    EXPECT_EQ(columns(quant, 256), 32) << quant;
    EXPECT_EQ(columns(quant, 257), middle) << quant;
    EXPECT_EQ(columns(quant, 512), middle) << quant;
  }
  for (const char* quant : {"nvfp4", "int4-g32", "q4k"}) {
    EXPECT_EQ(columns(quant, 8192), 160) << quant;
  }
  EXPECT_EQ(columns("q5k", 8192), 136);
  for (const char* quant : {"mxfp4-bf16", "mxfp8"}) EXPECT_EQ(columns(quant, 8192), 144) << quant;
  EXPECT_EQ(columns("int4-g128", 8192), 136);
  EXPECT_EQ(columns("int4-fp8", 8192), 136);
  for (const char* quant : {"nf4-bf16", "fp8-bf16", "int8", "bf16"}) {
    EXPECT_EQ(columns(quant, 8192), 128) << quant;
  }
  for (const char* quant : {"bf16", "fp8-block", "fp8-channel", "int8", "int4-fp8"}) {
    EXPECT_EQ(columns(quant, 128), 32) << quant;
    EXPECT_EQ(columns(quant, 129), 64) << quant;
  }
}

// Squared ReLU has the wide groups of SwiGLU in the formats of models that use it.
TEST(CudaPlan, ActivationsHaveTheirEpilogues) {
  const auto epilogue = [](const char* quant, const char* activation) {
    MoeProblem p = test::small_problem(quant);
    p.activation = make_activation(activation).value();
    return make_experts_plan(p).value().epilogue;
  };
  for (const char* quant :
       {"bf16", "fp8-block", "fp8-tensor", "fp8-channel", "nvfp4", "nvfp4-bf16", "int4-g128", "awq",
        "int4-g32", "nf4-bf16", "int8-bf16", "fp8-bf16", "q4k", "q6k"}) {
    EXPECT_EQ(epilogue(quant, "relu2"), EpilogueKind::kRelu2) << quant;
    const TileRules& rules = rules_of(quant);
    const auto columns = [&](std::int64_t tokens) {
      return choose_grouped(rules, EpilogueKind::kRelu2, tokens, 8, 128, 6, {}).max_columns;
    };
    EXPECT_EQ(columns(1), 32) << "bands are not halved";
    EXPECT_EQ(columns(512), rules.middle);
    EXPECT_EQ(columns(97 * 16), rules.widest);
    EXPECT_EQ(columns(8192), rules.widest);
    EXPECT_FALSE(choose_grouped(rules, EpilogueKind::kRelu2, 8192, 8, 128, 6, {}).paired);
  }
  EXPECT_EQ(epilogue("int8", "relu2"), EpilogueKind::kPlain);
  EXPECT_EQ(epilogue("bf16", "silu_no_mul"), EpilogueKind::kPlain);
  EXPECT_EQ(epilogue("bf16", "gelu"), EpilogueKind::kGeneral);
  EXPECT_EQ(epilogue("bf16", "swiglustep"), EpilogueKind::kSwiglu);
  EXPECT_EQ(epilogue("int4-g128", "swiglustep"), EpilogueKind::kGeneral);
  for (const char* activation : {"silu", "swigluoai", "swiglustep", "gelu_tanh"}) {
    EXPECT_EQ(epilogue("q6k", activation), EpilogueKind::kSwiglu) << activation;
  }
}

// swiglustep limits silu of the gate, not the gate.
TEST(CudaPlan, SwigluStepIsOfTheSwigluFamily) {
  for (const float limit : {7.0F, 0.5F, 1.0F, 1e-6F, 300.0F}) {
    ActivationParams params;
    params.limit = limit;
    const GroupedActivation a = grouped_activation(make_activation("swiglustep", params).value());
    EXPECT_EQ(a.limit, limit);
    const double most = static_cast<double>(limit);
    for (const double gate : {-4.0, -1.3, -0.2, 0.3, 1.0, 6.9, 7.003, 7.005, 7.02, 9.0, 400.0}) {
      const double g = std::min(gate, static_cast<double>(a.most_gate));
      const double got = g / (1 + std::exp2(g * static_cast<double>(a.slope)));
      const double want = std::min(gate / (1 + std::exp(-gate)), most);
      EXPECT_NEAR(got, want, 2e-7 * std::abs(want)) << gate << ", " << limit;
    }
  }
  const GroupedActivation none = grouped_activation([] {
    ActivationSpec spec = make_activation("swiglustep").value();
    spec.limit = std::numeric_limits<float>::infinity();
    return spec;
  }());
  EXPECT_TRUE(std::isinf(none.limit) && std::isinf(none.most_gate));
}

// The constants of the SwiGLU family make the other members of it.
TEST(CudaPlan, GeluTanhIsOfTheSwigluFamily) {
  const GroupedActivation a = grouped_activation(make_activation("gelu_tanh").value());
  for (const double g : {-4.0, -2.5, -0.3, 0.0, 0.7, 1.9, 8.0}) {
    const double power = g * (static_cast<double>(a.cubic) * g * g + static_cast<double>(a.slope));
    const double got = (1.5 + static_cast<double>(a.beta)) * (g / (1 + std::exp2(power)));
    const double want =
        0.5 * g * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (g + 0.044715 * g * g * g))) *
        1.5;
    EXPECT_NEAR(got, want, 1e-6 * std::abs(want)) << g;
  }
  EXPECT_EQ(grouped_activation(make_activation("silu").value()).cubic, 0.0F);
}

TEST(CudaPlan, OneTokenOfFewBandsHasThemHalved) {
  const auto halved = [](EpilogueKind epilogue, std::int64_t tokens, std::int64_t bands) {
    return choose_grouped(fp8_rules(), epilogue, tokens, 8, 128, bands, {}).max_columns ==
           kSplitColumns;
  };
  EXPECT_TRUE(halved(EpilogueKind::kSwiglu, 1, 6)) << "Qwen3-30B: 48 items";
  EXPECT_FALSE(halved(EpilogueKind::kSwiglu, 1, 12)) << "Qwen3-235B: 96 items";
  EXPECT_EQ(choose_grouped(bf16_rules(), EpilogueKind::kSwiglu, 1, 8, 128, 12, {}).max_columns,
            kSplitColumns)
      << "the same in bf16";
  EXPECT_FALSE(halved(EpilogueKind::kSwiglu, 2, 6));
  EXPECT_FALSE(halved(EpilogueKind::kGeneral, 1, 6));
  EXPECT_FALSE(halved(EpilogueKind::kPlain, 1, 6));
}

// An H100 PCIe has 114 multiprocessors: 57 pairs of CTAs.
TEST(CudaPlan, SmallerPartsHaveFewerPairsOfCtas) {
  const auto halved = [](int sms, std::int64_t bands, const TileRules& rules) {
    return choose_grouped(rules, EpilogueKind::kSwiglu, 1, 8, 128, bands, hopper_traits(sms))
               .max_columns == kSplitColumns;
  };
  EXPECT_TRUE(halved(132, 8, fp8_rules())) << "64 items, 66 pairs";
  EXPECT_FALSE(halved(114, 8, fp8_rules())) << "64 items, 57 pairs";
  EXPECT_TRUE(halved(114, 7, fp8_rules()));
  EXPECT_TRUE(halved(132, 16, bf16_rules())) << "128 items, two each";
  EXPECT_FALSE(halved(114, 16, bf16_rules()));
  const DeviceTraits measured, sxm = hopper_traits(132);
  EXPECT_EQ(sxm.clusters_of_4, measured.clusters_of_4);
  EXPECT_EQ(sxm.clusters_of_8, measured.clusters_of_8);
  EXPECT_EQ(sxm.sure_clusters_of_8, measured.sure_clusters_of_8);
  EXPECT_EQ(sxm.l2_bytes_per_us, measured.l2_bytes_per_us);
}

// The table says what the kernels take, and refuses the rest by name.
TEST(CudaFormats, ARowForEachSchemeThatTheKernelsCompute) {
  const FormatRow& bf16 = *format_of(test::small_problem("bf16")).value();
  EXPECT_EQ(bf16.chunk_k, 64);
  EXPECT_EQ(bf16.slab_bytes, 128 * 128);
  EXPECT_EQ(bf16.parts.size(), 2U);
  const FormatRow& f16 = *format_of(test::small_problem("f16")).value();
  EXPECT_EQ(f16.slab_bytes, bf16.slab_bytes);
  EXPECT_FALSE(row_is_quantised(f16.rows));
  EXPECT_FALSE(row_has_values(f16.rows));
  EXPECT_TRUE(row_has_wide_result(f16.rows));
  EXPECT_FALSE(row_has_wide_result(bf16.rows));
  const FormatRow& fp8 = *format_of(test::small_problem("fp8-block")).value();
  EXPECT_EQ(fp8.chunk_k, 128);
  EXPECT_EQ(fp8.slab_bytes, 128 * 128);
  EXPECT_EQ(fp8.parts.size(), 4U);
  for (const char* quant : {"fp8-channel", "fp8-tensor", "fp8-static", "int8"}) {
    const FormatRow& row = *format_of(test::small_problem(quant)).value();
    EXPECT_TRUE(row_is_whole(row.rows)) << quant;
    EXPECT_EQ(row.slab_bytes, 128 * 128) << quant;
    EXPECT_EQ(row.parts.size(), 6U) << quant;
  }
  const FormatRow& mxfp4 = *format_of(test::small_problem("mxfp4-bf16")).value();
  EXPECT_EQ(mxfp4.chunk_k, 64);
  EXPECT_EQ(mxfp4.slab_bytes, 128 * (32 + 2)) << "codes and two exponents per row";
  // Rows that become values are bf16 operands, of the weights' kernel.
  for (const char* quant : {"mxfp8", "mxfp4", "nvfp4"}) {
    const FormatRow& row = *format_of(test::small_problem(quant)).value();
    EXPECT_TRUE(row_has_values(row.rows)) << quant;
    EXPECT_FALSE(row_has_scales(row.rows)) << quant;
    EXPECT_EQ(row.chunk_k, 64) << quant;
  }
  EXPECT_EQ(format_of(test::small_problem("nvfp4-bf16")).value()->rows, RowForm::kBf16);
  EXPECT_EQ(format_of(test::small_problem("nvfp4-bf16")).value()->slab_bytes, 128 * (32 + 4));
  for (const auto rows : grouped_formats()) {
    for (const FormatRow& row : rows) EXPECT_EQ(row.chunk_k * row_element_bytes(row.rows), 128);
  }
  test::expect_refusal(
      format_of(test::small_problem("f32")).status(), StatusCode::kUnsupported,
      {"scheme: got f32", "need bf16, f16, fp8-block, mxfp4-bf16, fp8-scaled, int8", "nvfp4-bf16"});
  for (const char* quant : {"int4-g128-int8", "int8-g128-int8", "awq-int8"}) {
    test::expect_refusal(format_of(test::small_problem(quant)).status(), StatusCode::kUnsupported,
                         {"scheme: got int8-group", "need bf16"});
    EXPECT_TRUE(general_experts_take(test::small_problem(quant)).ok()) << quant;
  }
  test::expect_refusal(make_experts_plan(test::small_problem("f32")).status(),
                       StatusCode::kUnsupported, {"scheme"});
}

// FP8 blocks of other sizes are the general experts', with quantised activations or without.
TEST(CudaFormats, BlocksOfOtherSizes) {
  for (const char* quant : {"fp8-block-64x64", "fp8-block-32x128", "fp8-block-128x64"}) {
    const MoeProblem p = test::small_problem(quant);
    test::expect_refusal(format_of(p).status(), StatusCode::kUnsupported,
                         {"scheme: got fp8-any-block", "fp8-block"});
    ASSERT_TRUE(general_experts_take(p).ok()) << quant;
    EXPECT_EQ(GeneralPlan(p).values->columns, p.quant.weight.block_k);
  }
  const MoeProblem p = test::small_problem("fp8-bf16-64x64");
  EXPECT_TRUE(general_experts_take(p).ok());
  EXPECT_TRUE(GeneralPlan(p).decodes);
}

// Every code at every place of a word, times every factor.
TEST(CudaFormats, E2m1CodesBecomeBf16) {
  for (std::uint32_t c = 0; c < 16; ++c) {
    for (int place = 0; place < 4; ++place) {
      const std::uint32_t other = 15 - c;  // in the other half, and in all other places
      std::uint32_t word = 0;
      for (int i = 0; i < 4; ++i) {
        word |= place_e2m1(i == place ? c : other, other, i);
      }
      std::uint32_t a[4];
      e2m1_fragment(word, a);
      for (int e8m0 = kLeastE2m1Scale; e8m0 <= kLargestE2m1Scale; ++e8m0) {
        const float factor = f32_from_bf16(static_cast<std::uint16_t>(e2m1_factor(e8m0) << 7));
        const float got = f32_from_bf16(static_cast<std::uint16_t>(a[place])) * factor;
        const float want = std::ldexp(f32_from_e2m1(static_cast<std::uint8_t>(c)), e8m0 - 127);
        ASSERT_EQ(got, want) << c << ' ' << place << ' ' << e8m0;
        ASSERT_EQ(f32_from_bf16(bf16_from_f32(want)), want);
        ASSERT_EQ(std::signbit(got), std::signbit(want));
      }
      EXPECT_EQ(f32_from_bf16(static_cast<std::uint16_t>(a[place] >> 16)) * 0x1p126F,
                f32_from_e2m1(static_cast<std::uint8_t>(other)));
    }
  }
}

TEST(CudaPlan, PairsShareBf16WeightsOfFullGroups) {
  const auto paired = [](const TileRules& format, EpilogueKind epilogue, std::int64_t tokens) {
    return choose_grouped(format, epilogue, tokens, 8, 128, 6, {}).paired;
  };
  EXPECT_FALSE(paired(bf16_rules(), EpilogueKind::kSwiglu, 1024));
  EXPECT_TRUE(paired(bf16_rules(), EpilogueKind::kSwiglu, 2048));
  EXPECT_TRUE(paired(bf16_rules(), EpilogueKind::kSwiglu, 8192));
  EXPECT_FALSE(paired(bf16_rules(), EpilogueKind::kGeneral, 8192));
  EXPECT_FALSE(paired(fp8_rules(), EpilogueKind::kSwiglu, 8192));
}

TEST(CudaPlan, RepackedShapes) {
  // DeepSeek-V3: 16 bands of 128 channels, 56 chunks; 28 bands, 16 chunks.
  const WeightShape w13{{4096, 7168, 1, true}, 16384}, w2{{7168, 2048, 1, false}, 16384};
  EXPECT_EQ(w13.bands(), 16);
  EXPECT_EQ(w13.chunks(), 56);
  EXPECT_EQ(w13.image_bytes(), 4096 * 7168);
  EXPECT_EQ(w2.bands(), 28);
  EXPECT_EQ(w2.image_bytes(), 7168 * 2048);
  // Ragged: 90 channels are two slabs of 64; 272 rows three slabs of 128; 200 bytes two chunks.
  const RepackShape gated{180, 100, 2, true}, plain{272, 100, 2, false};
  EXPECT_EQ(gated.slabs(), 2);
  EXPECT_EQ(gated.bands(), 1);
  EXPECT_EQ(gated.chunks(), 2);
  EXPECT_EQ(plain.slabs(), 3);
  EXPECT_EQ(plain.bands(), 2);
}

// Any split of pairs over experts needs at most this many records.
TEST(CudaPlan, RecordBoundHoldsForTheWorstSplits) {
  for (const std::int64_t rows : {16, 32, 64, 256}) {
    for (const std::int64_t pairs : {0, 1, 7, 31, 32, 33, 1000}) {
      for (const std::int64_t experts : {1, 6, 64}) {
        // One row each for all but one expert, the rest for that one.
        const std::int64_t ones = pairs < experts - 1 ? pairs : experts - 1;
        const std::int64_t groups = ones + (pairs - ones + rows - 1) / rows;
        EXPECT_LE(groups, max_group_records(pairs, experts, rows)) << pairs << ' ' << experts;
        // As many experts as possible with rows + 1 rows.
        const std::int64_t twos = pairs / (rows + 1) < experts ? pairs / (rows + 1) : experts;
        EXPECT_LE(2 * twos, max_group_records(pairs, experts, rows));
      }
    }
  }
}

// CudaRows::kept: calls with as many tokens quantise to one place, whatever else
// differs.
TEST(CudaPlan, RowsStandWhereTokensAloneSay) {
  const MoeProblem many = test::small_problem("fp8-block");
  MoeProblem one = many;
  one.num_experts = one.num_local_experts = one.top_k = 1;
  one.intermediate_size *= 2;
  alignas(64) static std::byte memory[1 << 20];
  for (const std::int64_t tokens : {1, 5, 300}) {
    const auto carve = [&](const MoeProblem& p) {
      Arena arena(memory);
      return ExpertsWorkspace::carve(p, make_experts_plan(p).value(), tokens, 0, arena);
    };
    const ExpertsWorkspace a = carve(many), b = carve(one);
    ASSERT_NE(a.rows, nullptr);
    EXPECT_EQ(a.rows, b.rows);
    EXPECT_EQ(a.row_scale, b.row_scale);
    EXPECT_EQ(a.row_scale_stride, b.row_scale_stride);
  }
}

TEST(CudaPlan, WorkspaceIsMonotone) {
  MoeProblem p = test::small_problem("fp8-block");
  p.max_tokens = 4096;
  const ExpertsPlan plan = make_experts_plan(p).value();
  std::int64_t last = 0;
  for (std::int64_t tokens = 0; tokens < 300; ++tokens) {
    Arena arena = Arena::measure();
    ExpertsWorkspace::carve(p, plan, tokens, 0, arena);
    ASSERT_TRUE(arena.status().ok());
    EXPECT_GE(arena.used(), last);
    last = arena.used();
  }
}

// A list with room for some rows has memory for those, whatever else there may be of; with room for
// more than there are pairs it is as large as one without a limit, but for the rows' own numbers.
// Longer rows would be read as rows of no columns.
TEST(CudaPlan, RowsHaveFewerThan2To31Bytes) {
  for (const char* quant : {"bf16", "f16", "int8-bf16"}) {
    MoeProblem p = test::small_problem(quant);
    p.hidden_size = (std::int64_t{1} << 29) - 512;
    EXPECT_TRUE(CudaExperts::can_implement(p).ok()) << CudaExperts::can_implement(p).to_string();
    p.hidden_size = std::int64_t{1} << 29;
    test::expect_refusal(CudaExperts::can_implement(p), StatusCode::kUnsupported,
                         {"hidden_size: got 536870912", "at most 536870911"});
  }
}

TEST(CudaPlan, WorkspaceIsForAsManyRowsAsTheListMayHave) {
  for (const char* quant : {"bf16", "fp8-block", "int8"}) {
    MoeProblem p = test::small_problem(quant);
    p.max_tokens = 4096;
    const auto bytes = [&](std::int64_t tokens, std::int64_t capacity) {
      return CudaExperts::workspace_size(p, tokens, capacity).value();
    };
    const std::int64_t pairs = 4096 * p.top_k, row = p.hidden_size * 2 + p.intermediate_size;
    EXPECT_GE(bytes(4096, 0) - bytes(4096, pairs / 4), (pairs - pairs / 4) * row) << quant;
    EXPECT_EQ(bytes(4096, pairs), bytes(4096, pairs + 1));
    EXPECT_LE(bytes(4096, 0), bytes(4096, pairs));
    EXPECT_LE(bytes(4096, pairs) - bytes(4096, 0), pairs * 4 + 64) << quant;
    EXPECT_EQ(CudaExperts::workspace_size(p, 4096).value(), bytes(4096, 0));
  }
}

}  // namespace
}  // namespace moesaic::cuda
