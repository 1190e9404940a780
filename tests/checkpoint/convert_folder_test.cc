// Which folders a conversion may take, and what becomes of those that killed ones left.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoint/container/mapped_file.h"
#include "checkpoint/container_support.h"
#include "checkpoint/convert/folder.h"
#include "moesaic/convert.h"
#include "support/refusal.h"
#include "support/source_folder.h"

// What was flushed to the disk, by the names that it had then.
std::vector<std::string>& flushed() {
  static std::vector<std::string> names;
  return names;
}
// In place of the C library's.
extern "C" int fsync(int fd) {
  std::error_code error;
  flushed().push_back(
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error).string());
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace moesaic::test {
namespace {

namespace fs = std::filesystem;

std::string text_of(const std::string& path) {
  return checkpoint::read_text_file(path, 1 << 20).value();
}

void make_file(const std::string& path, const std::string& text = "x") {
  std::ofstream(path, std::ios::binary) << text;
}

Status convert(const std::string& from, const std::string& to, bool force = false,
               ConvertReport* report = nullptr, bool* output_failed = nullptr) {
  ConvertOptions options;
  options.scheme = "mxfp8";
  options.num_threads = 1;
  options.replace_any_folder = force;
  options.failed_on_output = output_failed;
  Result<ConvertReport> made = convert_checkpoint(from, to, options);
  if (made.ok() && report != nullptr) *report = *made;
  return made.status();
}

// The number of a process that is gone.
long gone_process() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  return child;
}

class ConvertFolder : public testing::Test {
 protected:
  void refuses(const std::string& to, StatusCode code, std::initializer_list<const char*> words,
               bool force = false) {
    SCOPED_TRACE(to);
    bool output_failed = false;
    expect_refusal(convert(model_, to, force, nullptr, &output_failed), code, words);
    EXPECT_TRUE(output_failed);
  }
  void SetUp() override {
    fs::copy(bundled_model("mini-qwen3-moe"), model_, fs::copy_options::recursive);
  }
  std::string path(const std::string& name) const { return root_.path(name); }

  const TempDir root_;
  const std::string model_ = root_.path("model");
};

TEST_F(ConvertFolder, TheModelStaysWhole) {
  fs::create_directory_symlink(model_, path("link"));
  for (const char* to : {"model", "model/", "link", "model/.", "link/../model"}) {
    refuses(path(to), StatusCode::kInvalidArgument, {"the model's own folder"}, true);
  }
  for (const char* to : {"model/sub", "link/sub"}) {
    refuses(path(to), StatusCode::kInvalidArgument, {"inside the model"}, true);
  }
  refuses(root_.path(), StatusCode::kInvalidArgument, {"holds the model"}, true);
  // A model of links into another folder, as download caches make it.
  fs::create_directory(path("blobs"));
  fs::create_directory(path("snapshot"));
  for (const fs::directory_entry& entry : fs::directory_iterator(model_)) {
    const std::string name = entry.path().filename().string();
    fs::copy_file(entry.path(), path("blobs/" + name));
    fs::create_symlink(path("blobs/" + name), path("snapshot/" + name));
  }
  expect_refusal(convert(path("snapshot"), path("blobs"), true), StatusCode::kInvalidArgument,
                 {"holds the file", "link"});
  EXPECT_TRUE(convert(path("snapshot"), path("out")).ok());
}

TEST_F(ConvertFolder, PlacesThatCannotBeWritten) {
  make_file(path("file"));
  refuses("", StatusCode::kInvalidArgument, {"no name"});
  refuses(path("file"), StatusCode::kInvalidArgument, {"no folder"}, true);
  refuses(path("none/out"), StatusCode::kNotFound, {"no folder", "none"});
  refuses(path("file/out"), StatusCode::kInvalidArgument, {"no folder"});
  fs::create_symlink(path("nothing"), path("dangling"));
  refuses(path("dangling"), StatusCode::kInvalidArgument, {"link that leads nowhere"});
  refuses("/", StatusCode::kInvalidArgument, {}, true);
  refuses("/proc", StatusCode::kInvalidArgument, {"mount point"}, true);
  refuses("/proc/out", StatusCode::kIo, {"/proc"});
  fs::create_directories(path("here/below"));
  const fs::path before = fs::current_path();
  fs::current_path(path("here/below"));
  refuses(path("here"), StatusCode::kInvalidArgument, {"current folder"}, true);
  refuses(".", StatusCode::kInvalidArgument, {"current folder"}, false);  // empty
  fs::current_path(before);
}

// Numbers that Python writes and JSON lacks stay in config.json as they were.
TEST_F(ConvertFolder, NumbersOfPythonStayInTheConfiguration) {
  std::string text = text_of(path("model/config.json"));
  const std::string limits = "\"time_step_limit\": [\n    0.0,\n    Infinity\n  ],\n  ";
  text.insert(text.find('"'), limits);
  make_file(path("model/config.json"), text);
  const Status status = convert(model_, path("out"));
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_NE(text_of(path("out/config.json")).find(limits), std::string::npos);
  EXPECT_TRUE(Checkpoint::open(path("out")).ok());
}

// A link that leads nowhere, a folder, a pipe, weights in other files: beside the model, and no reason
// to fail.
TEST_F(ConvertFolder, WhatCannotBeCopiedIsSaid) {
  fs::create_symlink(path("nothing"), path("model/notice.txt"));
  fs::create_directory(path("model/figures"));
  ASSERT_EQ(::mkfifo(path("model/pipe").c_str(), 0600), 0);
  make_file(path("model/tokenizer.json"), "{}");
  make_file(path("model/consolidated.safetensors"));
  make_file(path("model/pytorch_model.bin"));
  for (int i = 0; i < 40; ++i) make_file(path("model/x-" + std::to_string(100 + i) + ".pt"));
  make_file(path("model/quantization_config.json"), "{}");  // AutoRound's, of the source
  ConvertReport report;
  const Status status = convert(model_, path("out"), false, &report);
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_EQ(report.notes, (std::vector<std::string>{
                              "folders of the source are not copied: \"figures\"",
                              "links to nothing of the source are not copied: \"notice.txt\"",
                              "other entries of the source are not copied: \"pipe\"",
                              "other files of weights of the source are not copied: "
                              "\"consolidated.safetensors\", \"pytorch_model.bin\", "
                              "\"x-100.pt\", \"x-101.pt\", \"x-102.pt\", \"x-103.pt\", "
                              "\"x-104.pt\", \"x-105.pt\", 34 more"}));
  EXPECT_EQ(text_of(path("out/tokenizer.json")), "{}");
  EXPECT_FALSE(fs::exists(path("out/quantization_config.json")));
}

// Files, then the folder, then the name that it gets.
TEST_F(ConvertFolder, TheResultIsOnTheDisk) {
  flushed().clear();
  ASSERT_TRUE(convert(model_, path("out")).ok());
  const std::string folder = path("out.tmp-" + std::to_string(::getpid()));
  const auto at = [&](const std::string& name) {
    return std::find(flushed().rbegin(), flushed().rend(), name) - flushed().rbegin();
  };
  EXPECT_EQ(at(fs::path(folder).parent_path().string()), 0);
  EXPECT_EQ(at(folder), 1);
  for (const auto& entry : fs::directory_iterator(path("out"))) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("model-")) continue;  // under a name of its own until it is whole
    EXPECT_LT(at(folder + "/" + name), std::ssize(flushed())) << name;
  }
}

TEST_F(ConvertFolder, OnlyResultsAreReplaced) {
  const std::string out = path("out");
  fs::create_directory(out);
  EXPECT_TRUE(convert(model_, out + "/").ok());  // an empty folder
  const auto names = [&] {
    std::vector<std::string> list;
    for (const auto& entry : fs::directory_iterator(out)) list.push_back(entry.path().filename());
    std::sort(list.begin(), list.end());
    return list;
  };
  const std::vector<std::string> files = names();
  EXPECT_EQ(std::count(files.begin(), files.end(), checkpoint::kConversionMark), 0);
  const fs::path shard = fs::path(out) / "config.json";
  make_file(shard.string(), "old");
  EXPECT_TRUE(convert(model_, out).ok());  // a result
  EXPECT_NE(read_bytes(shard.string()), "old");
  EXPECT_EQ(names(), files);
  make_file(out + "/notes.txt", "mine");
  refuses(out, StatusCode::kInvalidArgument, {"notes.txt", "--force"});
  EXPECT_EQ(read_bytes(out + "/notes.txt"), "mine");
  fs::create_directory_symlink(out, path("link"));
  EXPECT_TRUE(convert(model_, path("link"), true).ok());  // follows the link
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(names(), files);
  // Folders and links are nobody's result, whatever the record says.
  fs::remove(shard);
  fs::create_symlink("/dev/null", shard);
  refuses(out, StatusCode::kInvalidArgument, {"config.json"});
  // A model that happens to lie there.
  fs::copy(model_, path("other"));
  refuses(path("other"), StatusCode::kInvalidArgument, {"no conversion wrote"});
  for (const std::string& entry : root_.entries()) {
    EXPECT_EQ(entry.find(".tmp-"), std::string::npos) << entry;
  }
}

// A file that came along is part of the result whatever bytes its name has.
TEST_F(ConvertFolder, NamesThatAreNoTextAreRecorded) {
  const std::string name = "read\xff\n\xc3(me", out = path("out");
  make_file(path("model/" + name), "mine");
  ASSERT_TRUE(convert(model_, out).ok());
  const Status again = convert(model_, out);
  EXPECT_TRUE(again.ok()) << again.to_string();
  EXPECT_EQ(read_bytes(out + "/" + name), "mine");
  make_file(path("out/read\xfe\n\xc3(me"));
  refuses(out, StatusCode::kInvalidArgument, {"no conversion wrote", "read\\xfe"});
  for (const char* broken :
       {R"({"bytes":"7"})", R"({"bytes":"7g"})", R"({"bytes":7})", "[]", "7"}) {
    EXPECT_EQ(checkpoint::name_of_record(nlohmann::json::parse(broken)), "") << broken;
  }
}

// A file that appears in the old result while the new one is written is not lost.
TEST_F(ConvertFolder, TheOldFolderIsLookedAtAgain) {
  const std::string out = path("out");
  ASSERT_TRUE(convert(model_, out).ok());
  ConvertOptions options;
  options.scheme = "mxfp8";
  options.should_stop = [&] {
    make_file(out + "/late.txt");
    return false;
  };
  expect_refusal(convert_checkpoint(model_, out, options).status(), StatusCode::kInvalidArgument,
                 {"late.txt"});
  EXPECT_TRUE(fs::exists(out + "/late.txt"));
}

TEST_F(ConvertFolder, LeftOversOfKilledRunsGo) {
  const std::string out = path("out");
  const long gone = gone_process();
  const auto folder = [&](long process) { return out + ".tmp-" + std::to_string(process); };
  const auto mark = [&](const std::string& at) {
    fs::create_directories(at);
    make_file(at + "/" + checkpoint::kConversionMark);
    make_file(at + "/model-00001-of-00002.safetensors");
  };
  ConvertReport report;
  const auto note = [&](std::initializer_list<std::string> words) {
    ASSERT_EQ(report.notes.size(), 1U);
    for (const std::string& word : words) {
      EXPECT_NE(report.notes[0].find(word), std::string::npos) << report.notes[0];
    }
  };
  // Killed in the middle; and one of our own number, as in a container.
  mark(folder(gone));
  ASSERT_TRUE(convert(model_, out, false, &report).ok());
  note({"removed", folder(gone), "gone"});
  EXPECT_FALSE(fs::exists(folder(gone)));
  mark(folder(::getpid()));
  ASSERT_TRUE(convert(model_, out, false, &report).ok());
  note({"removed"});
  // Killed at once, and when all was written but the name.
  fs::create_directory(folder(gone));
  ASSERT_TRUE(convert(model_, out, false, &report).ok());
  note({"removed"});
  fs::rename(out, folder(gone));
  ASSERT_TRUE(convert(model_, out, false, &report).ok());
  note({"removed"});
  EXPECT_FALSE(fs::exists(folder(gone)));
  // A process that runs, and one whose number means nothing here but which holds its mark.
  mark(folder(::getppid()));
  ASSERT_TRUE(convert(model_, out, false, &report).ok());
  note({"running"});
  EXPECT_TRUE(fs::exists(folder(::getppid())));
  fs::remove_all(folder(::getppid()));
  mark(folder(gone));
  const int held = ::open((folder(gone) + "/" + checkpoint::kConversionMark).c_str(), O_RDWR);
  ASSERT_EQ(::flock(held, LOCK_EX), 0);
  ASSERT_TRUE(convert(model_, out, false, &report).ok());
  note({"in use"});
  EXPECT_TRUE(fs::exists(folder(gone)));
  ::close(held);
  fs::remove_all(folder(gone));
  // Not ours: without the mark; a link; another name.
  fs::create_directory(folder(gone));
  make_file(folder(gone) + "/thesis.txt");
  fs::create_directory_symlink(model_, out + ".tmp-1");
  mark(out + ".tmp-old");
  ASSERT_TRUE(convert(model_, out, false, &report).ok());
  note({"not removed", folder(gone)});
  EXPECT_TRUE(fs::exists(folder(gone) + "/thesis.txt"));
  EXPECT_TRUE(fs::exists(model_ + "/config.json"));
  EXPECT_TRUE(fs::exists(out + ".tmp-old"));
}

TEST_F(ConvertFolder, GgufIsNoSource) {
  make_file(path("a.gguf"), "GGUF");
  fs::create_directory(path("parts"));
  make_file(path("parts/a-00001-of-00002.gguf"), "GGUF");
  for (const char* from : {"a.gguf", "parts"}) {
    bool output_failed = true;
    expect_refusal(convert(path(from), path("out"), false, nullptr, &output_failed),
                   StatusCode::kUnsupported, {"GGUF", "safetensors"});
    EXPECT_FALSE(output_failed);
  }
  expect_refusal(convert(path("none.gguf"), path("out")), StatusCode::kNotFound, {"none.gguf"});
}

}  // namespace
}  // namespace moesaic::test
