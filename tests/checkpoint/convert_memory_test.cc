// How much memory a conversion needs: measured as the process's peak of resident pages, mapped
// files included, so alone in its binary.
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "moesaic/checkpoint.h"
#include "moesaic/convert.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kExperts = 8, kHidden = 256, kWidth = 512;
constexpr std::int64_t kLayerBytes = kExperts * 3 * kHidden * kWidth * 2;  // 6 MiB of BF16
// Stacks of threads, the allocator's slack, headers, the copying buffer of 4 MiB.
constexpr std::int64_t kConstantBytes = std::int64_t{8} << 20;

// A line "Vm...:  123 kB" of this process; -1 where the system has none.
std::int64_t status_bytes(const std::string& key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return -1;
}
// Makes the peak start at what is resident now.
bool reset_peak() {
  std::ofstream out("/proc/self/clear_refs");
  out << "5";
  out.flush();
  return out.good() && status_bytes("VmHWM") <= status_bytes("VmRSS") + (1 << 20);
}

// One file per layer, as big models have them.
void write_model(const std::string& folder, int layers) {
  fs::create_directories(folder);
  Rng rng(3);
  const Tensor first = random_normal(rng, DType::kBF16, {kWidth, kHidden}, 0.05);
  const Tensor down = random_normal(rng, DType::kBF16, {kHidden, kWidth}, 0.05);
  const Tensor gate = random_normal(rng, DType::kBF16, {kExperts, kHidden});
  nlohmann::json weight_map;
  for (int i = 0; i < layers; ++i) {
    const std::string block = "model.layers." + std::to_string(i) + ".mlp.";
    const std::string file = "layer-" + std::to_string(i) + ".safetensors";
    std::vector<NamedTensor> tensors = {{block + "gate.weight", gate.view()}};
    for (std::int64_t e = 0; e < kExperts; ++e) {
      const std::string expert = block + "experts." + std::to_string(e) + ".";
      tensors.push_back({expert + "gate_proj.weight", first.view()});
      tensors.push_back({expert + "up_proj.weight", first.view()});
      tensors.push_back({expert + "down_proj.weight", down.view()});
    }
    for (const NamedTensor& t : tensors) weight_map[t.name] = file;
    ASSERT_TRUE(write_safetensors(folder + "/" + file, tensors).ok());
  }
  std::ofstream(folder + "/model.safetensors.index.json")
      << nlohmann::json{{"weight_map", weight_map}};
  std::ofstream(folder + "/config.json") << nlohmann::json{
      {"model_type", "qwen3_moe"},       {"hidden_size", kHidden},      {"num_experts", kExperts},
      {"moe_intermediate_size", kWidth}, {"num_hidden_layers", layers}, {"num_experts_per_tok", 2},
      {"torch_dtype", "bfloat16"}};
}

class ConvertMemory : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "convert-memory-" + std::to_string(::getpid());
    fs::remove_all(root_);
    if (!reset_peak()) GTEST_SKIP() << "this system does not let a process reset its peak memory";
  }
  void TearDown() override { fs::remove_all(root_); }

  // Peak above what was resident before.
  std::int64_t peak(int layers, const std::string& scheme, FileAccess access) {
    const std::string from = root_ + "/from" + std::to_string(layers), to = root_ + "/to";
    if (!fs::exists(from)) write_model(from, layers);
    ::malloc_trim(0);  // what earlier steps left would be used again and not be seen
    EXPECT_TRUE(reset_peak());
    const std::int64_t before = status_bytes("VmRSS");
    ConvertOptions options;
    options.scheme = scheme;
    options.access = access;
    options.num_threads = 2;
    const Result<ConvertReport> report = convert_checkpoint(from, to, options);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    const std::int64_t used = status_bytes("VmHWM") - before;
    EXPECT_GE(report->bytes_in, layers * kLayerBytes);
    fs::remove_all(to);
    return used;
  }
  std::string root_;
};

// The tests below could not fail if the meter saw no memory.
TEST_F(ConvertMemory, TheMeterSeesMemory) {
  const std::int64_t before = status_bytes("VmRSS");
  { const std::vector<char> pages(static_cast<std::size_t>(3 * kLayerBytes), 1); }
  EXPECT_GE(status_bytes("VmHWM") - before, 3 * kLayerBytes - (1 << 20));
}

TEST_F(ConvertMemory, TwoLayersAndAConstantAreEnoughForSix) {
  const auto measure = [&](const char* scheme, FileAccess access) {
    const std::int64_t used = peak(6, scheme, access);
    EXPECT_LE(used, 2 * kLayerBytes + kConstantBytes) << scheme;
    std::cout << scheme << ": " << (used >> 20) << " MiB above the start, a layer has "
              << (kLayerBytes >> 20) << " MiB\n";
    return used;
  };
  // Six layers need what one needs: two experts in fp32 and their codes. Layers that were kept
  // would add five; what the allocator and the threads hold moves by a few MiB.
  const std::int64_t one = peak(1, "fp8-block", FileAccess::kMmap);
  const std::int64_t six = measure("fp8-block", FileAccess::kMmap);
  EXPECT_LE(six, one + kLayerBytes);
  measure("fp8-block", FileAccess::kCopy);
  measure("int4-g128", FileAccess::kMmap);
}

}  // namespace
}  // namespace moesaic::test
