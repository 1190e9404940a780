// Every quantised format, written by an independent script: the loaded weights mean the script's
// numbers, slices and shares of ranks add up, and the layer's output is the script's float64 one
// within the scheme's bound.
#include <gtest/gtest.h>

#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>

#include "checkpoint/generated_files.h"
#include "checkpoint/tiny_support.h"
#include "moesaic/fused_moe.h"
#include "moesaic/numerics.h"
#include "numerics/element.h"
#include "support/metrics.h"

namespace moesaic::test {
namespace {

struct QuantCase {
  std::string name, path, values, golden, quant;
  std::vector<int> tp;
};

class QuantCheckpoints : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string python = MOESAIC_PYTHON;
    if (python.empty()) return;
    folder_ = new TempDir();
    const auto files = generate_files(python, "make_quant_checkpoints.py", *folder_);
    problem_ = files.problem;
    for (const auto& item : files.manifest) {
      QuantCase c;
      c.name = item["name"];
      c.path = folder_->path(item["path"].get<std::string>());
      c.values = folder_->path(c.name + ".values.safetensors");
      c.golden = folder_->path(item["golden"].get<std::string>());
      c.quant = item["quant"];
      c.tp = item["tp"].get<std::vector<int>>();
      cases_.push_back(std::move(c));
    }
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
    cases_.clear();
  }
  void SetUp() override {
    if (folder_ == nullptr) GTEST_SKIP() << "no Python 3 interpreter: checkpoints not written";
    ASSERT_EQ(problem_, "");
    ASSERT_GE(cases_.size(), 45U);
  }
  static const std::vector<QuantCase>& cases() { return cases_; }
  static const QuantCase& find(const std::string& name) {
    for (const QuantCase& c : cases_) {
      if (c.name == name) return c;
    }
    throw std::out_of_range(name);
  }

 private:
  static TempDir* folder_;
  static std::string problem_;
  static std::vector<QuantCase> cases_;
};
TempDir* QuantCheckpoints::folder_ = nullptr;
std::string QuantCheckpoints::problem_;
std::vector<QuantCase> QuantCheckpoints::cases_;

// One matrix of a view with what belongs to it.
struct MatrixView {
  ConstTensorView weight, scale, global, channel, zero, min, perm;
  std::int64_t parts = 1;  // blocks of rows are counted within each
};
MatrixView w13_of(const ExpertWeightsView& v) {
  return {v.w13,      v.w13_scale, v.w13_global_scale, v.w13_channel_scale,
          v.w13_zero, v.w13_min,   v.w13_perm,         2};
}
MatrixView w2_of(const ExpertWeightsView& v) {
  return {v.w2, v.w2_scale, v.w2_global_scale, v.w2_channel_scale, v.w2_zero, v.w2_min, v.w2_perm};
}

// What a code stands for, from the formats' definitions.
float code_value(const OperandQuant& w, ConstTensorView codes, std::int64_t i) {
  constexpr std::array<float, 16> kNf4 = {-1.0F,
                                          -0.6961928009986877F,
                                          -0.5250730514526367F,
                                          -0.39491748809814453F,
                                          -0.28444138169288635F,
                                          -0.18477343022823334F,
                                          -0.09105003625154495F,
                                          0.0F,
                                          0.07958029955625534F,
                                          0.16093020141124725F,
                                          0.24611230194568634F,
                                          0.33791524171829224F,
                                          0.44070982933044434F,
                                          0.5626170039176941F,
                                          0.7229568362236023F,
                                          1.0F};
  constexpr std::array<float, 8> kFp4 = {0.0F,       0.0052083333F, 0.6666667F, 1.0F,
                                         0.3333333F, 0.5F,          0.1666667F, 0.25F};
  constexpr std::array<float, 16> kIq4 = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
  const auto byte = [&](std::int64_t at) { return static_cast<int>(codes.data[at]); };
  const int nibble = dtype_bits(codes.dtype) == 4 ? (byte(i / 2) >> (i % 2 * 4)) & 15 : 0;
  const auto n = static_cast<std::size_t>(nibble);
  if (w.table == CodeTable::kNf4) return kNf4[n];
  if (w.table == CodeTable::kIq4Nl) return kIq4[n];
  if (w.table == CodeTable::kFp4) return n < 8 ? kFp4[n] : -kFp4[n - 8];
  switch (codes.dtype) {
    case DType::kI4:
      return static_cast<float>(nibble < 8 ? nibble : nibble - 16);
    case DType::kU4:
      return static_cast<float>(nibble);
    case DType::kI8:
      return codes.as<std::int8_t>()[i];
    case DType::kU8:
      return codes.as<std::uint8_t>()[i];
    default:
      return load_as_f32(codes.data, codes.dtype, i);
  }
}

// Row-major values in the order of the activations.
std::vector<double> dequantise(const OperandQuant& w, const MatrixView& m) {
  const std::int64_t rows = m.weight.dim(0), cols = m.weight.dim(1), part = rows / m.parts;
  std::vector<double> out(static_cast<std::size_t>(rows * cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      std::int64_t at = 0;
      switch (w.granularity) {
        case ScaleGranularity::kChannel:
          at = r;
          break;
        case ScaleGranularity::kGroup:
          at = r * ((cols + w.block_k - 1) / w.block_k) + c / w.block_k;
          break;
        case ScaleGranularity::kBlock:
          at = (r / part * ((part + w.block_n - 1) / w.block_n) + r % part / w.block_n) *
                   ((cols + w.block_k - 1) / w.block_k) +
               c / w.block_k;
          break;
        default:
          break;
      }
      float q = code_value(w, m.weight, r * cols + c);
      if (m.zero.present()) q -= m.zero.as<std::uint8_t>()[at];
      const bool scaled = w.granularity != ScaleGranularity::kNone;
      double v = q;
      if (scaled) v *= load_as_f32(m.scale.data, m.scale.dtype, at);
      if (w.table != CodeTable::kNone || w.granularity == ScaleGranularity::kChannel) {
        v = static_cast<float>(v);  // tables and quotients are not short numbers
      }
      if (m.min.present()) v -= m.min.as<float>()[at];
      if (m.global.present()) v *= m.global.as<float>()[0];
      if (m.channel.present()) v *= m.channel.as<float>()[r];
      const std::int64_t to = m.perm.present() ? m.perm.as<std::int32_t>()[c] : c;
      out[static_cast<std::size_t>(r * cols + to)] = v;
    }
  }
  return out;
}

std::vector<double> slab(const Tensor& stacked, std::int64_t i) {
  const std::int64_t size = stacked.shape()[1] * stacked.shape()[2];
  const float* from = stacked.as<float>() + i * size;
  return {from, from + size};
}

// Largest difference relative to the larger value; 0 means equal numbers.
double relative_difference(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return INFINITY;
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    const double d = std::abs(got[i] - want[i]) / std::max(std::abs(got[i]), std::abs(want[i]));
    if (!(d <= worst)) worst = d;
  }
  return worst;
}

TEST_F(QuantCheckpoints, LoadToTheNumbersOfTheFiles) {
  for (const QuantCase& c : cases()) {
    SCOPED_TRACE(c.name);
    const Checkpoint checkpoint = must_open(c.path);
    EXPECT_EQ(checkpoint.problems(), std::vector<std::string>());
    ASSERT_EQ(checkpoint.layers().size(), 1U);
    const TensorFile values = must_open_file(c.values);
    const Tensor w13 = values.read("w13").value(), w2 = values.read("w2").value();
    Result<MoeLayerWeights> loaded = checkpoint.load_layer(0, ParallelConfig{});
    ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
    const OperandQuant& weight = loaded->spec.quant.weight;
    if (!c.quant.empty()) {
      EXPECT_EQ(loaded->spec.quant.name, c.quant);
    }
    // The one format whose loading rounds: its group scales become products of two levels.
    const double tolerance = c.quant == "int4-fp8" ? 0.07 : 0;
    for (std::int64_t e = 0; e < 4; ++e) {
      const Result<ExpertWeightsView> got = loaded->experts->expert(e);
      ASSERT_TRUE(got.ok()) << got.status().to_string();
      EXPECT_LE(relative_difference(dequantise(weight, w13_of(*got)), slab(w13, e)), tolerance)
          << "w13";
      EXPECT_LE(relative_difference(dequantise(weight, w2_of(*got)), slab(w2, e)), tolerance)
          << "w2";
      EXPECT_EQ(got->w13_input_scale.present(), values.contains("w13_input"));
      if (!got->w13_input_scale.present()) continue;
      EXPECT_EQ(*got->w13_input_scale.as<float>(), values.read("w13_input")->as<float>()[e]);
      EXPECT_EQ(*got->w2_input_scale.as<float>(), values.read("w2_input")->as<float>()[e]);
    }
    EXPECT_EQ(loaded->shared != nullptr, values.contains("shared_w13"));
    if (!loaded->shared) continue;
    const OperandQuant& shared = loaded->shared_quant.weight;
    const Result<ExpertWeightsView> got = loaded->shared->expert(0);
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(relative_difference(dequantise(shared, w13_of(*got)),
                                  slab(values.read("shared_w13").value(), 0)),
              0);
    EXPECT_EQ(relative_difference(dequantise(shared, w2_of(*got)),
                                  slab(values.read("shared_w2").value(), 0)),
              0);
    // Only two orders of columns in one matrix have no form but F32.
    EXPECT_EQ(shared.granularity == ScaleGranularity::kNone, c.name == "gptq_shared_two_orders");
  }
}

// Sizes of blocks, and so of groups of activations, are the configuration's.
TEST_F(QuantCheckpoints, BlocksOfOtherSizesAreASchemeOfTheirOwn) {
  for (const auto& [name, rows, columns, kind] :
       std::vector<std::tuple<std::string, std::int64_t, std::int64_t, ComputeScheme>>{
           {"fp8_block_64x64", 64, 64, ComputeScheme::kFp8AnyBlock},
           {"fp8_block_32x128", 32, 128, ComputeScheme::kFp8AnyBlock},
           {"fp8_block_ragged", 48, 80, ComputeScheme::kFp8AnyBlock},
           {"ct_fp8_block_64", 64, 32, ComputeScheme::kFp8AnyBlock},
           {"ct_fp8_block_wo", 16, 64, ComputeScheme::kWeightOnly},
           {"ct_fp8_block", 128, 128, ComputeScheme::kFp8Block}}) {
    SCOPED_TRACE(name);
    const MoeLayerSpec spec = must_open(find(name).path).layer(0).value();
    EXPECT_EQ(spec.quant.kind, kind);
    EXPECT_EQ(spec.quant.weight.block_n, rows);
    EXPECT_EQ(spec.quant.weight.block_k, columns);
    if (kind != ComputeScheme::kWeightOnly) {
      EXPECT_EQ(spec.quant.activation.block_k, columns);
    }
    EXPECT_EQ(spec.quant.activation.scale_format == ScaleFormat::kE8M0, name == "fp8_block_32x128");
  }
}

// A cut falls neither into a block of rows of gate and up nor into one of columns of down.
TEST_F(QuantCheckpoints, ACutIntoABlockNamesTheBlock) {
  ParallelConfig parallel;
  parallel.tp_size = 4;
  // 256 / 4 are 64 columns: two blocks of 32 rows, and half a block of 128 columns.
  const Status status = must_open(find("fp8_block_32x128").path).load_layer(0, parallel).status();
  EXPECT_EQ(mismatch(status, StatusCode::kInvalidArgument,
                     {"got 64 of 256", "tp_size 4", "the weight block 128"}),
            "");
}

// A quantised shared expert of the routed experts' width takes the memory that one of them takes:
// in F32 it would be 4 to 8 times as much.
TEST_F(QuantCheckpoints, ASharedExpertKeepsItsFormatInMemory) {
  for (const char* name :
       {"fp8_static", "gptq", "awq", "modelopt_mxfp4_fp8_dynamic", "bnb_nf4", "gguf_iq4_shared"}) {
    SCOPED_TRACE(name);
    const Checkpoint checkpoint = must_open(find(name).path);
    const MoeLayerSpec spec = checkpoint.layer(0).value();
    ASSERT_EQ(spec.shared.intermediate_size, spec.intermediate_size);
    const Result<MoeLayerFormat> format = checkpoint.check_layer(0);
    ASSERT_TRUE(format.ok()) << format.status().to_string();
    EXPECT_EQ(format->shared_quant.weight, format->spec.quant.weight);
    FusedMoE::Options options;
    options.num_threads = 1;
    const std::int64_t with = FusedMoE::from_checkpoint(checkpoint, 0, options)->weight_bytes();
    options.include_shared = false;
    const std::int64_t routed = FusedMoE::from_checkpoint(checkpoint, 0, options)->weight_bytes();
    EXPECT_GT(with, routed);
    EXPECT_LE(with - routed, routed / spec.num_experts);
  }
}

// y = W2 ((W1 x) * (W3 x)) of one expert in float64.
std::vector<double> bilinear(const std::vector<double>& w13, const std::vector<double>& w2,
                             const std::vector<double>& x) {
  const std::size_t h = x.size(), i = w13.size() / h / 2;
  const auto dot = [&](std::size_t row) {
    double sum = 0;
    for (std::size_t c = 0; c < h; ++c) sum += w13[row * h + c] * x[c];
    return sum;
  };
  std::vector<double> middle(i), y(h);
  for (std::size_t r = 0; r < i; ++r) middle[r] = dot(r) * dot(i + r);
  for (std::size_t r = 0; r < h; ++r) {
    for (std::size_t c = 0; c < i; ++c) y[r] += w2[r * i + c] * middle[c];
  }
  return y;
}

// Slices of all ranks together are the whole expert, whichever intermediate columns a rank has.
TEST_F(QuantCheckpoints, TensorParallelSlicesAddUp) {
  int slices = 0;
  for (const QuantCase& c : cases()) {
    const Checkpoint checkpoint = must_open(c.path);
    const TensorFile values = must_open_file(c.values);
    const Tensor w13 = values.read("w13").value(), w2 = values.read("w2").value();
    const auto h = static_cast<std::size_t>(w2.shape()[1]);
    std::vector<double> x(h);
    for (std::size_t j = 0; j < h; ++j) x[j] = std::sin(1.0 + static_cast<double>(j));
    for (const int tp : c.tp) {
      SCOPED_TRACE(c.name + " tp " + std::to_string(tp));
      std::vector<double> sum(h);
      for (int rank = 0; rank < tp; ++rank) {
        ParallelConfig parallel;
        parallel.tp_size = tp;
        parallel.tp_rank = rank;
        Result<MoeLayerWeights> loaded = checkpoint.load_layer(0, parallel);
        ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
        const OperandQuant& weight = loaded->spec.quant.weight;
        const Result<ExpertWeightsView> got = loaded->experts->expert(2);
        ASSERT_TRUE(got.ok()) << got.status().to_string();
        // MXFP4 is cut by groups, the last rank has zeros behind its own.
        const bool groups = weight.scale_format == ScaleFormat::kE8M0 && weight.block_k == 32 &&
                            weight.dtype == DType::kF4E2M1;
        const std::int64_t unit = groups ? 32 : 1;
        EXPECT_EQ(got->w2.dim(1), (w2.shape()[2] / tp + unit - 1) / unit * unit);
        const std::vector<double> part =
            bilinear(dequantise(weight, w13_of(*got)), dequantise(weight, w2_of(*got)), x);
        for (std::size_t j = 0; j < h; ++j) sum[j] += part[j];
        ++slices;
      }
      const std::vector<double> want = bilinear(slab(w13, 2), slab(w2, 2), x);
      EXPECT_LT(compare(sum, want).rel_l2, 1e-12);
    }
  }
  EXPECT_GT(slices, 60);
}

TEST_F(QuantCheckpoints, ExpertParallelSharesAreTheRightExperts) {
  for (const char* name : {"fp8_static", "ct_nvfp4", "gptq_desc_act", "bnb_nf4", "gguf_q4_0"}) {
    SCOPED_TRACE(name);
    const QuantCase& c = find(name);
    const Checkpoint checkpoint = must_open(c.path);
    const TensorFile values = must_open_file(c.values);
    const Tensor w2 = values.read("w2").value();
    for (int rank = 0; rank < 2; ++rank) {
      ParallelConfig parallel;
      parallel.ep_size = 2;
      parallel.ep_rank = rank;
      Result<MoeLayerWeights> loaded = checkpoint.load_layer(0, parallel);
      ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
      for (std::int64_t local = 0; local < 2; ++local) {
        const ExpertWeightsView got = loaded->experts->expert(local).value();
        EXPECT_EQ(relative_difference(dequantise(loaded->spec.quant.weight, w2_of(got)),
                                      slab(w2, 2 * rank + local)),
                  0);
        // Static activation scales are each expert's own, on whichever rank it is.
        if (!got.w13_input_scale.present()) continue;
        EXPECT_EQ(*got.w13_input_scale.as<float>(),
                  values.read("w13_input")->as<float>()[2 * rank + local]);
      }
    }
  }
}

// Codes stay nibbles where every projection's fit the same kind of nibble: of a table, signed, or
// from 0. Else they are bytes.
TEST_F(QuantCheckpoints, GgufCodesAreAsNarrowAsTheTypesAllow) {
  for (const auto& [name, dtype, table, group] :
       std::vector<std::tuple<std::string, DType, CodeTable, std::int64_t>>{
           {"gguf_iq4", DType::kU4, CodeTable::kIq4Nl, 32},
           {"gguf_iq4_slices", DType::kU4, CodeTable::kIq4Nl, 32},
           {"gguf_iq4_q3_k", DType::kI8, CodeTable::kNone, 16},
           {"gguf_q3_k", DType::kI4, CodeTable::kNone, 16},
           {"gguf_q5_1", DType::kI8, CodeTable::kNone, 32},
           {"gguf_tq2_0", DType::kI4, CodeTable::kNone, 256},
           {"gguf_mxfp4", DType::kF4E2M1, CodeTable::kNone, 32},
           {"gguf_mxfp4_q8_0", DType::kI8, CodeTable::kNone, 32},
           {"gguf_nvfp4", DType::kF4E2M1, CodeTable::kNone, 16},
           {"gguf_q4_k", DType::kU4, CodeTable::kNone, 32}}) {
    SCOPED_TRACE(name);
    const Result<MoeLayerWeights> loaded =
        must_open(find(name).path).load_layer(0, ParallelConfig{});
    ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
    const OperandQuant& weight = loaded->spec.quant.weight;
    EXPECT_EQ(weight.dtype, dtype);
    EXPECT_EQ(weight.table, table);
    EXPECT_EQ(weight.block_k, group);
  }
}

// What the types say of codes and scales goes with the layer, so that backends may hold them so.
TEST_F(QuantCheckpoints, GgufNumbersAreKnownForWhatTheyAre) {
  for (const auto& [name, code_bits, super_bits] :
       std::vector<std::tuple<std::string, int, int>>{{"gguf_q4_k", 0, 6},
                                                      {"gguf_q6_k", 6, 8},
                                                      {"gguf_q4_k_m", 6, 8},
                                                      {"gguf_q3_k", 0, 8},
                                                      {"gguf_q5_1", 6, 0},
                                                      {"gguf_q6_k_outer", 6, 0},
                                                      {"gguf_iq4_q3_k", 0, 0},
                                                      {"gguf_iq4_xs", 0, 8},
                                                      {"gguf_iq4", 0, 0},
                                                      {"gguf_tq2_0", 0, 0}}) {
    SCOPED_TRACE(name);
    const Result<MoeLayerWeights> loaded =
        must_open(find(name).path).load_layer(0, ParallelConfig{});
    ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
    EXPECT_EQ(loaded->spec.quant.weight.code_bits, code_bits);
    EXPECT_EQ(loaded->spec.quant.weight.super_bits, super_bits);
  }
}

// Where the types of gate and up and of down differ, each matrix is known for what it is.
TEST_F(QuantCheckpoints, GgufMatricesAreKnownForTheirOwnTypes) {
  const auto scheme_of = [&](const char* name) {
    return must_open(find(name).path).load_layer(0, ParallelConfig{}).value().spec.quant;
  };
  const Scheme mixed = scheme_of("gguf_q4_k_m");
  ASSERT_TRUE(mixed.forms.has_value());
  EXPECT_TRUE(mixed.forms->w13 == scheme_of("gguf_q4_k").weight);
  EXPECT_TRUE(mixed.forms->w2 == scheme_of("gguf_q6_k").weight);
  EXPECT_TRUE(validate(mixed).ok());
  const Scheme other = scheme_of("gguf_q3_k_m");  // Q3_K, Q5_1
  ASSERT_TRUE(other.forms.has_value());
  EXPECT_TRUE(other.forms->w13 == scheme_of("gguf_q3_k").weight);
  EXPECT_TRUE(other.forms->w2 == scheme_of("gguf_q5_1").weight);
  EXPECT_TRUE(validate(other).ok());
  for (const char* name : {"gguf_q4_k", "gguf_q5_1", "gguf_iq4_shared", "gguf_tq2_0"})
    EXPECT_FALSE(scheme_of(name).forms.has_value()) << name;
}

TEST_F(QuantCheckpoints, ScalesAreKnownForTheDtypeOfTheFile) {
  for (const auto& [name, dtype] :
       std::vector<std::pair<std::string, DType>>{{"gguf_q4_0", DType::kF16},
                                                  {"gguf_q5_1", DType::kF16},
                                                  {"gguf_iq4", DType::kF32},
                                                  {"gguf_tq2_0", DType::kF16},
                                                  {"gguf_q4_k", DType::kF32},
                                                  {"gguf_q6_k_outer", DType::kF32},
                                                  {"gguf_iq4_q3_k", DType::kF32},
                                                  {"ct_int4_f16_scales", DType::kF16},
                                                  {"ct_w4a8", DType::kF32},
                                                  {"gptq", DType::kF16},
                                                  {"gptq_8bit", DType::kF32},
                                                  {"awq", DType::kF16},
                                                  {"bnb_nf4", DType::kF32}}) {
    const Result<MoeLayerWeights> loaded =
        must_open(find(name).path).load_layer(0, ParallelConfig{});
    ASSERT_TRUE(loaded.ok()) << loaded.status().to_string();
    EXPECT_EQ(loaded->spec.quant.weight.scale_dtype, dtype) << name;
  }
}

// Slices that would cut a group, a block or a word in two.
TEST_F(QuantCheckpoints, SlicesFallOnWholeGroups) {
  for (const auto& [name, tp, unit] :
       std::vector<std::tuple<std::string, int, std::string>>{{"ct_mxfp8", 4, "block 32"},
                                                              {"ct_nvfp4", 8, "block 16"},
                                                              {"awq", 4, "block 32"},
                                                              {"bnb_nf4", 4, "block 64"},
                                                              {"gguf_q4_k", 2, "block 256"}}) {
    ParallelConfig parallel;
    parallel.tp_size = tp;
    const auto status = must_open(find(name).path).load_layer(0, parallel).status();
    EXPECT_EQ(mismatch(status, StatusCode::kInvalidArgument, {"intermediate_size", unit}), "")
        << name;
  }
}

// The only layer of a checkpoint against its golden file; adds the relative L2 error.
void check_output(const QuantCase& c, const std::string& quant) {
  SCOPED_TRACE(c.name + " as " + quant);
  const Checkpoint checkpoint = must_open(c.path);
  const TensorFile golden = must_open_file(c.golden);
  const Tensor input = golden.read("model.layers.0.mlp.input").value();
  const Tensor want = golden.read("model.layers.0.mlp.output").value();
  FusedMoE::Options options;
  options.num_threads = 1;
  options.quant = quant;
  const Result<FusedMoE> layer = FusedMoE::from_checkpoint(checkpoint, 0, options);
  ASSERT_TRUE(layer.ok()) << layer.status().to_string();
  Tensor output = Tensor::zeros(DType::kF32, input.shape()).value();
  std::fill_n(output.as<float>(), output.bytes() / 4, NAN);
  const Status status = layer->forward(input.view(), output.view());
  ASSERT_TRUE(status.ok()) << status.to_string();
  const Comparison found = compare(to_doubles(output.view()), to_doubles(want.view()));
  EXPECT_LE(found.rel_l2, layer->quant().output_bound) << found.describe;
  // Weight-only schemes are held to the 16-bit bound however the numbers are stored; a router
  // weight on the experts' input is rounded once more.
  if (c.quant.ends_with("-bf16") && quant == "as-is") {
    const double on_input =
        layer->spec().apply_router_weight_on_input ? weight_on_input_bound(DType::kBF16) : 0;
    EXPECT_EQ(layer->quant().output_bound, std::hypot(6e-3, on_input));
  }
  if (quant == "f32" && c.quant != "int4-fp8") {
    EXPECT_EQ(layer->quant().output_bound, 2e-6);
  }
  std::cout << c.name << " as " << quant << ": " << layer->quant().name << ", "
            << layer->experts_backend() << ", relative L2 " << found.rel_l2 << " of "
            << layer->quant().output_bound << "\n";
}

TEST_F(QuantCheckpoints, OutputsMeetTheBoundAgainstFloat64) {
  for (const QuantCase& c : cases()) check_output(c, "as-is");
}

// fp32 arithmetic on the stored numbers: static activation scales are set aside, and no format
// has an error of its own.
TEST_F(QuantCheckpoints, OutputsInFp32AreTheStoredNumbers) {
  for (const QuantCase& c : cases()) check_output(c, "f32");
}

// Scales of either sign, also under integer products.
TEST_F(QuantCheckpoints, NegativeScalesAreNumbersLikeOthers) {
  for (const char* name : {"gptq_signed", "awq_signed", "ct_int4_signed"}) {
    check_output(find(name), "int4-g128-int8");
  }
  check_output(find("ct_int8_signed"), "int8-g128-int8");
}

// Weights of schemes that quantise activations also run without that.
TEST_F(QuantCheckpoints, WeightOnlyOnRequest) {
  for (const auto& [name, quant] :
       std::vector<std::pair<std::string, std::string>>{{"fp8_static", "fp8-bf16"},
                                                        {"fp8_own_scales", "fp8-bf16"},
                                                        {"ct_fp8_channel", "fp8-bf16"},
                                                        {"ct_mxfp8", "fp8-bf16"},
                                                        {"ct_nvfp4", "nvfp4-bf16"},
                                                        {"ct_int8", "int8-bf16"}}) {
    check_output(find(name), quant);
  }
}

}  // namespace
}  // namespace moesaic::test
