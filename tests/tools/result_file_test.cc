// What results may overwrite.
#include "result_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "bench_plot.h"

namespace moesaic::tool {
namespace {

namespace fs = std::filesystem;

class ResultFiles : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() /
              ("moesaic-" + std::string(info->name()) + "-" + std::to_string(::getpid()));
    fs::create_directories(folder_ / "model");
    for (const char* name : {"model/config.json", "model/model-00001-of-00001.safetensors",
                             "model/tokenizer.model", "input", "other"}) {
      write(name, "content");
    }
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  std::string read(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(path(name), std::ios::binary).rdbuf();
    return text.str();
  }
  ResultFile to(const std::string& name, bool force = false) const {
    return {"--output", path(name),    ResultFile::Content::kLayerOutput,
            force,      path("model"), {path("input"), ""}};
  }
  // The words of a refusal as a wrong argument; "" when nothing is refused.
  static std::string refusal(const ResultFile& file) {
    const Status status = check_result_file(file);
    if (status.ok()) return "";
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
    EXPECT_TRUE(status.message().starts_with(file.option)) << status.message();
    return status.message();
  }
  static bool has(const std::string& text, const std::string& words) {
    return text.find(words) != std::string::npos;
  }
  static Status write_tensors(const ResultFile& file) {
    static const float kValue = 1;
    const NamedTensor tensor{"output",
                             {reinterpret_cast<const std::byte*>(&kValue), DType::kF32, {1}}};
    return write_result(file, std::span(&tensor, 1));
  }

 private:
  fs::path folder_;
};

TEST_F(ResultFiles, InputsAreNeverOverwritten) {
  fs::create_symlink("input", path("link"));
  fs::create_hard_link(path("input"), path("hard"));
  for (const char* name : {"input", "link", "hard", "model/../input"}) {
    for (const bool force : {false, true}) {
      EXPECT_TRUE(has(refusal(to(name, force)), "is read by this command")) << name;
    }
  }
  EXPECT_FALSE(write_tensors(to("hard", true)).ok());
  EXPECT_EQ(read("input"), "content");
}

TEST_F(ResultFiles, FilesOfTheModelAreNeverOverwritten) {
  const std::string shard = "model/model-00001-of-00001.safetensors";
  fs::create_symlink(path(shard), path("link"));
  fs::create_hard_link(path(shard), path("hard"));
  // A cache keeps the files elsewhere and the folder full of links.
  write("blob", "content");
  fs::create_symlink(path("blob"), path("model/model-00002-of-00002.safetensors"));
  for (const char* name : {"model/config.json", "model/model-00001-of-00001.safetensors",
                           "model/tokenizer.model", "link", "hard", "blob"}) {
    for (const bool force : {false, true}) {
      EXPECT_TRUE(has(refusal(to(name, force)), "file of the model")) << name;
    }
  }
  // A new name there that would be read as a part of the model.
  for (const char* name : {"model/model.safetensors", "model/model-00003-of-00003.safetensors",
                           "model/quantize_config.json", "model/golden.safetensors"}) {
    EXPECT_TRUE(has(refusal(to(name, true)), "would become a file of the model")) << name;
  }
  // Others may lie there, and be replaced by the next run.
  const ResultFile mine = to("model/out.safetensors");
  EXPECT_TRUE(write_tensors(mine).ok());
  EXPECT_TRUE(write_tensors(mine).ok());
  // A link in the folder does not make a stranger's result of ours the model's.
  EXPECT_TRUE(write_tensors(to("mine")).ok());
  fs::create_symlink(path("mine"), path("model/model-00009-of-00009.safetensors"));
  EXPECT_EQ(refusal(to("mine")), "");
}

TEST_F(ResultFiles, PartsOfAGgufModel) {
  for (const char* name :
       {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "n-00002-of-00002.gguf"}) {
    write(name, "content");
  }
  ResultFile file = to("m-00002-of-00002.gguf", true);
  file.model = path("m-00001-of-00002.gguf");
  EXPECT_TRUE(has(refusal(file), "file of the model"));
  file.path = path("m-00001-of-00002.gguf");
  EXPECT_TRUE(has(refusal(file), "file of the model"));
  file.path = path("n-00002-of-00002.gguf");
  EXPECT_EQ(refusal(file), "");
  file.force = false;
  EXPECT_TRUE(has(refusal(file), "--force"));
  file.path = path("new");
  EXPECT_EQ(refusal(file), "");
}

TEST_F(ResultFiles, OnlyResultsOfTheSameVerbAreReplacedUnasked) {
  EXPECT_TRUE(has(refusal(to("other")), "--force"));
  EXPECT_EQ(refusal(to("other", true)), "");
  EXPECT_FALSE(write_tensors(to("other")).ok());
  EXPECT_EQ(read("other"), "content");
  write("empty", "");  // as mktemp makes it: there is nothing to lose
  EXPECT_EQ(refusal(to("empty")), "");

  ASSERT_TRUE(write_tensors(to("mine")).ok());
  EXPECT_EQ(refusal(to("mine")), "");
  EXPECT_TRUE(write_tensors(to("mine")).ok());
  ResultFile plot = to("mine");
  plot.content = ResultFile::Content::kPlot;
  EXPECT_TRUE(has(refusal(plot), "--force"));

  plot.path = path("time.svg");
  const std::string svg = bench_svg("t", "a", {}, {});
  ASSERT_TRUE(write_result(plot, svg).ok());
  EXPECT_EQ(read("time.svg"), svg);
  EXPECT_EQ(refusal(plot), "");
  EXPECT_TRUE(has(refusal(to("time.svg")), "--force"));
  write("drawn.svg", "<svg xmlns=\"http://www.w3.org/2000/svg\">\n<!-- by hand -->" + svg);
  plot.path = path("drawn.svg");
  EXPECT_TRUE(has(refusal(plot), "--force"));

  // Another program's tensors, under the names of ours.
  const float value = 1;
  const NamedTensor tensor{"output",
                           {reinterpret_cast<const std::byte*>(&value), DType::kF32, {1}}};
  ASSERT_TRUE(write_safetensors(path("theirs"), std::span(&tensor, 1)).ok());
  EXPECT_TRUE(has(refusal(to("theirs")), "--force"));
}

TEST_F(ResultFiles, StandardStreams) {
  ResultFile file = to("new");
  EXPECT_FALSE(goes_to_stdout(file));
  for (const char* name : {"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"}) {
    file.path = name;
    EXPECT_TRUE(goes_to_stdout(file)) << name;
  }
  file.path = "/dev/stderr";
  EXPECT_TRUE(has(refusal(file), "messages"));
  file.path = "/dev/null";
  EXPECT_EQ(refusal(file), "");
  EXPECT_TRUE(write_tensors(file).ok());
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  file.path = path("model");
  EXPECT_EQ(check_result_file(file).code(), StatusCode::kIo);
  file.path = "";
  EXPECT_EQ(check_result_file(file).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moesaic::tool
