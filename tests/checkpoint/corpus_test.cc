// Runs every make_bad_*.py of this folder and opens each case it wrote through the public API.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/container/shards.h"
#include "checkpoint/generated_files.h"
#include "moesaic/checkpoint.h"
#include "support/source_folder.h"

namespace moesaic::test {
namespace {

// Opens a checkpoint and, on request, reads its first MoE layer to the last expert.
Status open_checkpoint(const std::string& path, FileAccess access, bool load) {
  const auto checkpoint = Checkpoint::open(path, {access});
  if (!checkpoint.ok() || !load) return checkpoint.ok() ? Status() : checkpoint.status();
  if (checkpoint->layers().empty()) return {StatusCode::kInternal, "no MoE layer"};
  const MoeLayerSpec& spec = checkpoint->layers().front();
  const auto layer = checkpoint->load_layer(spec.layer, ParallelConfig{});
  // What loading refuses, problems() must report; broken values are found by reading only.
  if (!layer.ok() && checkpoint->problems().empty()) {
    return {StatusCode::kInternal, "problems() is silent about " + layer.status().to_string()};
  }
  if (!layer.ok()) return layer.status();
  if (layer->shared) {
    const auto shared = layer->shared->expert(0);
    if (!shared.ok()) return shared.status();
  }
  for (std::int64_t e = 0; e < spec.num_experts; ++e) {
    const auto expert = layer->experts->expert(e);
    if (!expert.ok()) return expert.status();
  }
  return {};
}

Status open_case(const std::string& door, const std::string& path, FileAccess access) {
  if (door == "tensor_file") {
    const auto file = TensorFile::open(path, access);
    return file.ok() ? Status() : file.status();
  }
  if (door == "shards") {
    const auto set = checkpoint::ShardSet::open(path, access);
    return set.ok() ? Status() : set.status();
  }
  if (door == "checkpoint") {
    const auto checkpoint = Checkpoint::open(path, Checkpoint::Options{.access = access});
    return checkpoint.ok() ? Status() : checkpoint.status();
  }
  if (door == "checkpoint" || door == "layer") {
    return open_checkpoint(path, access, door == "layer");
  }
  return Status(StatusCode::kInternal, "unknown door " + door);
}

std::vector<std::string> generators() {
  std::vector<std::string> found;
  const std::string folder = test::source_folder() + "/tests/checkpoint";
  for (const auto& e : std::filesystem::directory_iterator(folder)) {
    const std::string name = e.path().filename().string();
    if (name.starts_with("make_bad_") && name.ends_with(".py")) found.push_back(name);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string printable(const testing::TestParamInfo<std::string>& info) {
  return info.param.substr(0, info.param.find('.'));
}

class Corpus : public testing::TestWithParam<std::string> {};

TEST_P(Corpus, EveryCaseIsRefusedAsTheManifestSays) {
  const std::string python = MOESAIC_PYTHON;
  if (python.empty()) GTEST_SKIP() << "no Python 3 interpreter was found: corpus not generated";
  TempDir dir;
  const auto [manifest, problem] = generate_files(python, GetParam(), dir);
  ASSERT_EQ(problem, "");
  int refused = 0;
  for (const auto& item : manifest) {
    const std::string name = item["name"];
    const std::string path = dir.path(item["path"].get<std::string>());
    const std::string code = item["code"];
    for (const FileAccess access : {FileAccess::kMmap, FileAccess::kCopy}) {
      const Status status = open_case(item["open"], path, access);
      EXPECT_EQ(status_code_name(status.code()), code) << name << ": " << status.to_string();
      if (status.ok()) continue;
      // The file a person has to look at (a folder's own path, or a file in it).
      EXPECT_NE(status.message().find(path), std::string::npos)
          << name << ": " << status.to_string();
      EXPECT_LT(status.message().size(), 1500U) << name;
      for (const std::string word : item["keywords"]) {
        EXPECT_NE(status.message().find(word), std::string::npos)
            << name << ": need '" << word << "' in " << status.to_string();
      }
    }
    if (code != "ok") ++refused;
  }
  std::cout << GetParam() << ": " << refused << " malformed of " << manifest.size() << " cases\n";
  EXPECT_GE(refused, 30);
}

INSTANTIATE_TEST_SUITE_P(Generators, Corpus, testing::ValuesIn(generators()), printable);

}  // namespace
}  // namespace moesaic::test
