#include "moesaic/convert.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "checkpoint/container/shards.h"
#include "checkpoint/convert/format.h"
#include "checkpoint/convert/index.h"
#include "checkpoint/convert/weight_errors.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"
#include "support/source_folder.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;
using test::expect_refusal;

class ConvertTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    root_ = testing::TempDir() + "convert-" + std::to_string(::getpid()) + info->name();
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string path(const std::string& name) const { return root_ + "/" + name; }

  ConvertReport convert(const std::string& from, const std::string& scheme, const std::string& to,
                        int threads = 1) {
    ConvertOptions options;
    options.scheme = scheme;
    options.num_threads = threads;
    Result<ConvertReport> report = convert_checkpoint(from, to, options);
    EXPECT_TRUE(report.ok()) << report.status().message();
    return report.ok() ? *std::move(report) : ConvertReport();
  }
  std::string root_;
};

std::vector<std::uint8_t> bytes_of(const checkpoint::ShardSet& shards, const std::string& name) {
  const auto found = shards.find(name);
  EXPECT_TRUE(found) << name;
  if (!found) return {};
  std::vector<std::uint8_t> bytes(found->info->bytes());
  EXPECT_TRUE(found->file->read(*found->info, std::as_writable_bytes(std::span(bytes))).ok());
  return bytes;
}
template <class T>
T at(const std::vector<std::uint8_t>& bytes, std::size_t i) {
  T value{};
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}
double bf16(const std::vector<std::uint8_t>& bytes, std::size_t i) {
  const std::uint32_t bits = static_cast<std::uint32_t>(at<std::uint16_t>(bytes, i)) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return static_cast<double>(value);
}
// By the definitions of the formats, not by this library's codecs.
double e4m3(std::uint8_t c) {
  const int e = c >> 3 & 15, m = c & 7;
  const double v = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
  return (c & 0x80) != 0 ? -v : v;
}
double e2m1(unsigned c) {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (c & 8U) != 0 ? -kValues[c & 7U] : kValues[c & 7U];
}

// A linear [n, k] of a converted checkpoint as real numbers.
std::vector<double> decode(const checkpoint::ShardSet& s, const std::string& scheme,
                           const std::string& module, std::size_t n, std::size_t k) {
  std::vector<double> out(n * k);
  const bool packed = scheme == "mxfp4" || scheme == "nvfp4" || scheme == "int4-g128";
  const auto w = bytes_of(s, module + (packed ? ".weight_packed" : ".weight"));
  const auto scale =
      bytes_of(s, module + (scheme == "fp8-block" ? ".weight_scale_inv" : ".weight_scale"));
  for (std::size_t i = 0; i < n * k; ++i) {
    const std::size_t row = i / k, col = i % k;
    const unsigned nibble = packed ? w[i / 2] >> (4 * (i % 2)) & 15U : 0U;
    if (scheme == "fp8-block") {
      out[i] = e4m3(w[i]) *
               static_cast<double>(at<float>(scale, row / 128 * ((k + 127) / 128) + col / 128));
    } else if (scheme == "fp8-channel") {
      out[i] = e4m3(w[i]) * static_cast<double>(at<float>(scale, row));
    } else if (scheme == "mxfp8") {
      out[i] = e4m3(w[i]) * std::ldexp(1.0, scale[i / 32] - 127);
    } else if (scheme == "mxfp4") {
      out[i] = e2m1(nibble) * std::ldexp(1.0, scale[i / 32] - 127);
    } else if (scheme == "nvfp4") {
      const auto global = bytes_of(s, module + ".weight_global_scale");
      out[i] = e2m1(nibble) * e4m3(scale[i / 16]) / static_cast<double>(at<float>(global, 0));
    } else {
      out[i] = (static_cast<double>(nibble) - 8) * bf16(scale, i / 128);
    }
  }
  return out;
}

struct Scheme {
  const char* name;
  double low, high;  // of the weights' relative error
};
const Scheme kSchemes[] = {{"fp8-block", 0.024, 0.028}, {"fp8-channel", 0.024, 0.028},
                           {"mxfp8", 0.025, 0.028},     {"mxfp4", 0.10, 0.125},
                           {"nvfp4", 0.085, 0.105},     {"int4-g128", 0.095, 0.13}};

// Every projection of every expert is where it belongs and within its format's error.
TEST_F(ConvertTest, WeightsAreTheOriginalsWithinTheFormatsError) {
  const std::string from = test::bundled_model("mini-deepseek-v3");
  const checkpoint::ShardSet before = checkpoint::ShardSet::open(from, FileAccess::kMmap).value();
  for (const Scheme& scheme : kSchemes) {
    SCOPED_TRACE(scheme.name);
    const ConvertReport report = convert(from, scheme.name, path(scheme.name));
    ASSERT_EQ(report.layers.size(), 1U);
    EXPECT_GT(report.layers[0].rel_l2_weights, scheme.low);
    EXPECT_LT(report.layers[0].rel_l2_weights, scheme.high);
    const checkpoint::ShardSet after =
        checkpoint::ShardSet::open(path(scheme.name), FileAccess::kMmap).value();
    EXPECT_EQ(static_cast<std::int64_t>(after.total_bytes()), report.bytes_out);
    double err = 0, norm = 0;
    for (const std::size_t e : {0U, 7U, 15U}) {
      for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
        const bool down = projection[0] == 'd';
        const std::size_t n = down ? 256 : 128, k = down ? 128 : 256;
        const std::string module =
            "model.layers.1.mlp.experts." + std::to_string(e) + "." + projection;
        const auto got = decode(after, scheme.name, module, n, k);
        const auto want = bytes_of(before, module + ".weight");
        double e2 = 0, n2 = 0;
        for (std::size_t i = 0; i < n * k; ++i) {
          e2 += (got[i] - bf16(want, i)) * (got[i] - bf16(want, i));
          n2 += bf16(want, i) * bf16(want, i);
        }
        EXPECT_LT(std::sqrt(e2 / n2), 1.1 * scheme.high) << module;
        err += e2;
        norm += n2;
      }
    }
    // The report says the same as the files, up to the choice of experts.
    EXPECT_NEAR(std::sqrt(err / norm) / report.layers[0].rel_l2_weights, 1.0, 0.05);
    const auto recorded = converted_weight_error(path(scheme.name), 1);
    ASSERT_TRUE(recorded.ok() && *recorded);
    EXPECT_EQ(**recorded, report.layers[0].rel_l2_weights);
    EXPECT_FALSE(*converted_weight_error(path(scheme.name), 0));
  }
  EXPECT_FALSE(*converted_weight_error(from, 1));
}

TEST_F(ConvertTest, Nvfp4SharesOneGlobalScaleBetweenGateAndUp) {
  convert(test::bundled_model("mini-qwen3-moe"), "nvfp4", path("out"));
  const checkpoint::ShardSet s = checkpoint::ShardSet::open(path("out"), FileAccess::kMmap).value();
  const std::string module = "model.layers.1.mlp.experts.3.";
  EXPECT_EQ(bytes_of(s, module + "gate_proj.weight_global_scale"),
            bytes_of(s, module + "up_proj.weight_global_scale"));
}

TEST_F(ConvertTest, GptOssKeepsItsOwnLayout) {
  const ConvertReport report = convert(test::bundled_model("mini-gpt-oss"), "mxfp4", path("out"));
  ASSERT_EQ(report.layers.size(), 1U);
  const checkpoint::ShardSet before =
      checkpoint::ShardSet::open(test::bundled_model("mini-gpt-oss"), FileAccess::kMmap).value();
  const checkpoint::ShardSet after =
      checkpoint::ShardSet::open(path("out"), FileAccess::kMmap).value();
  const std::string p = "model.layers.0.mlp.experts.";
  EXPECT_EQ(bytes_of(after, p + "gate_up_proj_bias"), bytes_of(before, p + "gate_up_proj_bias"));
  // Source [E, H, 2I] with interleaved columns; result rows in the same interleaved order.
  const auto source = bytes_of(before, p + "gate_up_proj");
  const auto blocks = bytes_of(after, p + "gate_up_proj_blocks");
  const auto scales = bytes_of(after, p + "gate_up_proj_scales");
  const std::size_t h = 256, rows = 512;
  double err = 0, norm = 0;
  for (std::size_t e = 0; e < 8; ++e) {
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < h; ++c) {
        const std::size_t i = (e * rows + r) * h + c;
        const double got =
            e2m1(blocks[i / 2] >> (4 * (i % 2)) & 15U) * std::ldexp(1.0, scales[i / 32] - 127);
        const double want = bf16(source, (e * h + c) * rows + r);
        err += (got - want) * (got - want);
        norm += want * want;
      }
    }
  }
  EXPECT_LT(std::sqrt(err / norm), 0.125);
  const Result<Checkpoint> checkpoint = Checkpoint::open(path("out"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_TRUE(checkpoint->problems().empty());
  // And back to a format per expert: refused with the way out.
  ConvertOptions options;
  options.scheme = "nvfp4";
  expect_refusal(convert_checkpoint(path("out"), path("no"), options).status(),
                 StatusCode::kUnsupported, {"stacked", "mxfp4"});
}

// FP8 blocks load at once; converting them again changes no code.
TEST_F(ConvertTest, ConvertedModelsConvertAgain) {
  convert(test::bundled_model("mini-deepseek-v3"), "fp8-block", path("fp8"));
  const Result<Checkpoint> checkpoint = Checkpoint::open(path("fp8"));
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_TRUE(checkpoint->problems().empty()) << checkpoint->problems().front();
  EXPECT_EQ(checkpoint->layers()[0].quant.weight.dtype, DType::kF8E4M3);
  const ConvertReport again = convert(path("fp8"), "fp8-block", path("fp8-again"));
  EXPECT_EQ(again.layers[0].rel_l2_weights, 0.0);
  const checkpoint::ShardSet a = checkpoint::ShardSet::open(path("fp8"), FileAccess::kMmap).value();
  const checkpoint::ShardSet b =
      checkpoint::ShardSet::open(path("fp8-again"), FileAccess::kMmap).value();
  ASSERT_EQ(a.tensors().size(), b.tensors().size());
  for (const checkpoint::ShardSet::Located& t : a.tensors()) {
    ASSERT_EQ(bytes_of(a, t.info->name), bytes_of(b, t.info->name)) << t.info->name;
  }
  const ConvertReport wide = convert(path("fp8"), "mxfp8", path("mxfp8"));
  EXPECT_GT(wide.layers[0].rel_l2_weights, 0.0);
  EXPECT_LT(wide.layers[0].rel_l2_weights, 0.028);
}

TEST_F(ConvertTest, ThreadsDoNotChangeTheBytes) {
  convert(test::bundled_model("mini-qwen3-moe"), "int4-g128", path("one"), 1);
  convert(test::bundled_model("mini-qwen3-moe"), "int4-g128", path("three"), 3);
  for (const fs::directory_entry& entry : fs::directory_iterator(path("one"))) {
    std::ifstream x(entry.path(), std::ios::binary);
    std::ifstream y(path("three") + "/" + entry.path().filename().string(), std::ios::binary);
    const std::string left(std::istreambuf_iterator<char>(x), {});
    const std::string right(std::istreambuf_iterator<char>(y), {});
    EXPECT_TRUE(left == right) << entry.path();
  }
}

// BF16 numbers of a tensor of a model of one file, in place of what it has.
void overwrite(const std::string& file, const std::string& tensor, std::uint16_t number) {
  std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
  std::uint64_t size = 0;
  f.read(reinterpret_cast<char*>(&size), 8);
  std::string header(size, '\0');
  f.read(header.data(), static_cast<std::streamsize>(size));
  const auto range = nlohmann::json::parse(header).at(tensor).at("data_offsets");
  const auto begin = range[0].get<std::uint64_t>(), end = range[1].get<std::uint64_t>();
  const std::vector<std::uint16_t> numbers((end - begin) / 2, number);
  f.seekp(static_cast<std::streamoff>(8 + size + begin));
  f.write(reinterpret_cast<const char*>(numbers.data()), static_cast<std::streamsize>(end - begin));
  ASSERT_TRUE(f.good()) << tensor;
}

// Numbers below what a scale reaches become zeros, which says nothing in a sum with all others.
TEST_F(ConvertTest, ALinearThatIsLostIsNamed) {
  fs::copy(test::bundled_model("mini-qwen3-moe"), path("model"), fs::copy_options::recursive);
  const std::string down = "model.layers.1.mlp.experts.3.down_proj";
  const checkpoint::ShardSet before =
      checkpoint::ShardSet::open(path("model"), FileAccess::kCopy).value();
  const std::string file = before.find(down + ".weight")->file->path();
  ConvertOptions options;
  options.scheme = "mxfp4";
  const auto converted = [&] { return convert_checkpoint(path("model"), path("out"), options); };
  overwrite(file, down + ".weight", 11);  // 1.01e-39
  expect_refusal(
      converted().status(), StatusCode::kUnsupported,
      {"layer 1", "expert 3", down.c_str(), "off by 1 of", "at most 0.5", "too small for mxfp4"});
  EXPECT_FALSE(fs::exists(path("out")));
  overwrite(file, down + ".weight", 0);  // as of an expert that was cut off
  EXPECT_TRUE(converted().ok());
}

// Told before anything is written.
TEST_F(ConvertTest, AxesThatCannotBeCopied) {
  fs::copy(test::bundled_model("mini-qwen3-moe"), path("model"), fs::copy_options::recursive);
  const std::string header = R"({"visual.patch":{"dtype":"U8","shape":[1,2,1,2,1,2],)"
                             R"("data_offsets":[0,8]}})";
  fs::remove(path("model") + "/model.safetensors.index.json");
  const std::uint64_t size = header.size();
  std::ofstream file(path("model") + "/model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), 8);
  file << header << std::string(8, 'x');
  file.close();
  ConvertOptions options;
  options.scheme = "mxfp8";
  options.progress = [](std::int64_t, std::int64_t) { ADD_FAILURE() << "something was written"; };
  expect_refusal(convert_checkpoint(path("model"), path("out"), options).status(),
                 StatusCode::kUnsupported, {"visual.patch", "got rank 6", "at most 5"});
}

// The golden file is the original's: what both steps did to the weights is between them.
TEST_F(ConvertTest, AConvertedModelsErrorsAddUp) {
  ConvertOptions options;
  options.scheme = "mxfp4";
  ASSERT_TRUE(
      convert_checkpoint(test::bundled_model("mini-deepseek-v3"), path("one"), options).ok());
  const int layer = Checkpoint::open(path("one"))->layers()[0].layer;
  const double first = converted_weight_error(path("one"), layer)->value();
  options.scheme = "fp8-block";
  const ConvertReport second = convert_checkpoint(path("one"), path("two"), options).value();
  const double step = second.layers[0].rel_l2_weights;
  EXPECT_GT(first, 0.1);
  EXPECT_LT(step, 0.04);
  EXPECT_DOUBLE_EQ(converted_weight_error(path("two"), layer)->value(), std::hypot(first, step));
}

TEST_F(ConvertTest, StoppingAndFailingLeaveNothing) {
  ConvertOptions options;
  options.scheme = "mxfp8";
  int asked = 0;
  options.should_stop = [&] { return ++asked > 10; };
  expect_refusal(
      convert_checkpoint(test::bundled_model("mini-qwen3-moe"), path("out"), options).status(),
      StatusCode::kIo, {"interrupted"});
  EXPECT_TRUE(fs::is_empty(root_));
  options.should_stop = []() -> bool { throw 1; };
  expect_refusal(
      convert_checkpoint(test::bundled_model("mini-qwen3-moe"), path("out"), options).status(),
      StatusCode::kInvalidArgument, {"should_stop", "exception"});
  EXPECT_TRUE(fs::is_empty(root_));
  options.should_stop = nullptr;
  std::int64_t last = 0, total = 0;
  options.progress = [&](std::int64_t done, std::int64_t all) {
    EXPECT_GE(done, last);
    last = done;
    total = all;
  };
  ASSERT_TRUE(convert_checkpoint(test::bundled_model("mini-qwen3-moe"), path("out"), options).ok());
  EXPECT_EQ(last, total);
  options.scheme = "mxfp9";
  expect_refusal(
      convert_checkpoint(test::bundled_model("mini-qwen3-moe"), path("x"), options).status(),
      StatusCode::kNotFound, {"mxfp9", "nearest is \"mxfp"});
  expect_refusal(converted_weight_error(path("out"), -1).status(), StatusCode::kOk, {});
  std::ofstream(path("out") + "/moesaic_conversion.json") << R"({"layers":[{"layer":1}]})";
  expect_refusal(converted_weight_error(path("out"), 1).status(), StatusCode::kCorruptFile,
                 {"rel_l2_weights"});
}

// w2 of small numbers is as far off as if they were large.
TEST(ConvertFormat, TheWorseMatrixCounts) {
  checkpoint::WeightErrors errors("int4-g128");
  const std::vector<float> large(64, 1.0F), small(64, 1e-6F), off(64, 0.75e-6F);
  const auto view = [](const std::vector<float>& v) {
    return ConstTensorView(reinterpret_cast<const std::byte*>(v.data()), DType::kF32, {8, 8});
  };
  using checkpoint::WeightMatrix;
  ASSERT_TRUE(errors.add(WeightMatrix::kW13, "up_proj", view(large), view(large)).ok());
  EXPECT_TRUE(errors.check().ok());
  ASSERT_TRUE(errors.add(WeightMatrix::kW2, "down_proj", view(small), view(off)).ok());
  EXPECT_NEAR(errors.relative(), 0.25, 0.25 * 1e-6);
  expect_refusal(errors.check(), StatusCode::kUnsupported, {"0.25", "at most 0.2", "int4-g128"});
  expect_refusal(errors.add(WeightMatrix::kW2, "down_proj", view(large), view(small)),
                 StatusCode::kUnsupported, {"down_proj", "off by 1 of", "too small"});
}

// The index of a result is read again.
TEST(ConvertFormat, ATooLargeIndexIsNotWritten) {
  checkpoint::PlannedShard shard;
  shard.file = "model-00001-of-00001.safetensors";
  shard.tensors = {{"a.weight", DType::kF32, {2, 3}}, {"b.weight", DType::kBF16, {5}}};
  const std::string text = checkpoint::converted_index(std::span(&shard, 1)).value();
  const auto index = nlohmann::json::parse(text);
  EXPECT_EQ(index["metadata"]["total_size"], 34);
  EXPECT_EQ(index["weight_map"]["b.weight"], shard.file);
  EXPECT_TRUE(checkpoint::converted_index(std::span(&shard, 1), text.size()).ok());
  const std::string size = std::to_string(text.size()), limit = std::to_string(text.size() - 1);
  expect_refusal(checkpoint::converted_index(std::span(&shard, 1), text.size() - 1).status(),
                 StatusCode::kLimitExceeded,
                 {"index.json", size.c_str(), "2 tensors", limit.c_str()});
}

TEST(ConvertFormat, SizesThatDoNotFit) {
  expect_refusal(checkpoint::check_linear(checkpoint::ConvertFormat::kInt4, "down", 256, 192),
                 StatusCode::kUnsupported, {"down", "192", "multiple of 128", "int4-g128"});
  expect_refusal(checkpoint::check_linear(checkpoint::ConvertFormat::kMxfp4, "down", 256, 48),
                 StatusCode::kUnsupported, {"multiple of 32"});
  EXPECT_TRUE(checkpoint::check_linear(checkpoint::ConvertFormat::kFp8Channel, "down", 3, 5).ok());
}

// Rows that are no multiple of a piece, every format: pieces give what the whole gives.
TEST(ConvertFormat, PiecesOfRowsAreWhole) {
  test::Rng rng(3);
  const Tensor w = test::random_normal(rng, DType::kF32, {300, 256});
  for (const Scheme& scheme : kSchemes) {
    SCOPED_TRACE(scheme.name);
    const checkpoint::ConvertFormat format =
        checkpoint::convert_format_from_name(scheme.name).value();
    std::vector<Tensor> one, many;
    Tensor decoded = Tensor::zeros(DType::kF32, {300, 256}).value();
    Tensor again = Tensor::zeros(DType::kF32, {300, 256}).value();
    test::poison(decoded.view());
    test::poison(again.view());
    ASSERT_TRUE(checkpoint::encode_linear(format, w.view(), 600.0F, 1, &one, decoded.view()).ok());
    ASSERT_TRUE(checkpoint::encode_linear(format, w.view(), 600.0F, 4, &many, again.view()).ok());
    std::string why;
    EXPECT_TRUE(test::same_bits(decoded.view(), again.view(), &why)) << why;
    for (std::size_t t = 0; t < one.size(); ++t) {
      EXPECT_TRUE(test::same_bits(one[t].view(), many[t].view(), &why)) << why;
    }
    const double rel =
        test::compare(test::to_doubles(decoded.view()), test::to_doubles(w.view())).rel_l2;
    EXPECT_GT(rel, scheme.low);
    EXPECT_LT(rel, scheme.high);
  }
}

}  // namespace
}  // namespace moesaic
