// Rules of a folder of shards. Malformed indices are in the corpus.
#include <gtest/gtest.h>

#include "checkpoint/container/shards.h"
#include "checkpoint/container_support.h"
#include "support/source_folder.h"

namespace moesaic::test {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";

Result<checkpoint::ShardSet> open(const TempDir& dir) {
  return checkpoint::ShardSet::open(dir.path(), FileAccess::kMmap);
}

unsigned char byte_of(const checkpoint::ShardSet& set, std::string_view name) {
  const auto located = set.find(name);
  EXPECT_TRUE(located.has_value()) << name;
  if (!located) return 0;
  std::byte b{};
  EXPECT_TRUE(located->file->read(*located->info, std::span(&b, 1)).ok());
  return static_cast<unsigned char>(b);
}

TEST(ShardSet, SingleFile) {
  TempDir dir;
  write_bytes(dir.path("model.safetensors"), simple_file({"b", "a"}));
  write_bytes(dir.path("golden.safetensors"), "not a model file: never opened");
  auto opened = open(dir);
  ASSERT_TRUE(opened.ok()) << opened.status().to_string();
  const checkpoint::ShardSet set = std::move(opened).value();  // pointers survive the move
  EXPECT_EQ(byte_of(set, "b"), 1);
  EXPECT_EQ(byte_of(set, "a"), 2);
  EXPECT_FALSE(set.find("c").has_value());
  ASSERT_EQ(set.tensors().size(), 2U);
  EXPECT_EQ(set.tensors()[0].info->name, "a");  // sorted
  EXPECT_EQ(set.total_bytes(), 2U);
  EXPECT_TRUE(set.warnings().empty());
}

TEST(ShardSet, IndexDecidesWhichFileCounts) {
  TempDir dir;
  write_bytes(dir.path("x.safetensors"), simple_file({"a", "extra", "b"}));
  write_bytes(dir.path("y.safetensors"), simple_file({"c", "a"}));
  // A consolidated duplicate that nobody lists must not even be opened.
  write_bytes(dir.path("model.safetensors"), "junk");
  write_bytes(dir.path(kIndex),
              R"({"metadata":{"total_size":3},"weight_map":)"
              R"({"a":"y.safetensors","b":"x.safetensors","c":"y.safetensors"}})");
  const auto set = open(dir);
  ASSERT_TRUE(set.ok()) << set.status().to_string();
  EXPECT_EQ(byte_of(*set, "a"), 2);  // y's, not x's
  EXPECT_EQ(byte_of(*set, "b"), 3);
  EXPECT_EQ(byte_of(*set, "c"), 1);
  EXPECT_FALSE(set->find("extra").has_value());
  EXPECT_EQ(set->total_bytes(), 3U);
  ASSERT_EQ(set->warnings().size(), 1U);
  for (const char* word : {"x.safetensors", "2 tensors", "\"a\"", "\"extra\""}) {
    EXPECT_NE(set->warnings()[0].find(word), std::string::npos) << set->warnings()[0];
  }
}

TEST(ShardSet, TotalSizeIsAdvisory) {
  TempDir dir;
  write_bytes(dir.path("x.safetensors"), simple_file({"a"}));
  const std::string map = R"("weight_map":{"a":"x.safetensors"}})";
  const std::pair<const char*, bool> cases[] = {
      {"{", false},
      {R"({"metadata":{},)", false},
      {R"({"metadata":{"total_size":1},)", false},
      {R"({"metadata":{"total_size":1.0},)", false},
      {R"({"metadata":{"total_size":1e300},)", false},  // no exact meaning: nothing to compare
      {R"({"metadata":{"total_size":2},)", true},
  };
  for (const auto& [head, warned] : cases) {
    write_bytes(dir.path(kIndex), head + map);
    const auto set = open(dir);
    ASSERT_TRUE(set.ok()) << head << set.status().to_string();
    EXPECT_EQ(set->warnings().size(), warned ? 1U : 0U) << head;
  }
}

TEST(ShardSet, NumberedFilesWithoutAnIndex) {
  TempDir dir;
  write_bytes(dir.path("model-00001-of-00002.safetensors"), simple_file({"b"}));
  write_bytes(dir.path("model-00002-of-00002.safetensors"), simple_file({"x", "a"}));
  write_bytes(dir.path("model-1-of-2.safetensors"), "not of this form: never opened");
  const auto set = open(dir);
  ASSERT_TRUE(set.ok()) << set.status().to_string();
  EXPECT_EQ(set->tensors().size(), 3U);
  EXPECT_EQ(byte_of(*set, "a"), 2);
  write_bytes(dir.path("model-00002-of-00002.safetensors"), simple_file({"x", "b"}));
  EXPECT_EQ(mismatch(open(dir).status(), StatusCode::kCorruptFile,
                     {"\"b\"", "two files", "model-00001-of-00002", "model-00002-of-00002"}),
            "");
}

// DeepSeek's and others' own files.
TEST(ShardSet, NumbersOfOtherLengths) {
  TempDir dir;
  write_bytes(dir.path("model-00001-of-000002.safetensors"), simple_file({"b"}));
  EXPECT_EQ(mismatch(open(dir).status(), StatusCode::kNotFound, {"shard 2 of 2 is missing"}), "");
  write_bytes(dir.path("model-000002-of-00002.safetensors"), simple_file({"x", "a"}));
  write_bytes(dir.path("model-0000000001-of-00002.safetensors"), "too long: never opened");
  const auto set = open(dir);
  ASSERT_TRUE(set.ok()) << set.status().to_string();
  EXPECT_EQ(set->tensors().size(), 3U);
}

TEST(ShardSet, AbsentThings) {
  TempDir dir;
  EXPECT_EQ(mismatch(checkpoint::ShardSet::open(dir.path("none"), FileAccess::kMmap).status(),
                     StatusCode::kNotFound, {"none"}),
            "");
  EXPECT_EQ(mismatch(open(dir).status(), StatusCode::kNotFound, {"no safetensors", kIndex}), "");
  write_bytes(dir.path("x.safetensors"), simple_file({"a"}));
  write_bytes(dir.path(kIndex), R"({"weight_map":{"b":"x.safetensors"}})");
  EXPECT_EQ(
      mismatch(open(dir).status(), StatusCode::kMissingTensor, {kIndex, "\"b\"", "x.safetensors"}),
      "");
  write_bytes(dir.path(kIndex), R"({"weight_map":{"b":"y.safetensors"}})");
  EXPECT_EQ(mismatch(open(dir).status(), StatusCode::kNotFound, {kIndex, "y.safetensors"}), "");
}

TEST(ShardSet, BundledCheckpointsOpenWithoutWarnings) {
  for (const char* name : {"mini-deepseek-v3", "mini-gpt-oss", "mini-qwen3-moe"}) {
    const auto set = checkpoint::ShardSet::open(test::bundled_model(name), FileAccess::kMmap);
    ASSERT_TRUE(set.ok()) << set.status().to_string();
    EXPECT_GT(set->total_bytes(), 0U);
    for (const std::string& w : set->warnings()) ADD_FAILURE() << w;
  }
}

}  // namespace
}  // namespace moesaic::test
