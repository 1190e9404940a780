// Destinations of results: files that appear whole, links that stay links, streams.
#include "checkpoint/container/output_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

#include "checkpoint/container_support.h"
#include "moesaic/checkpoint.h"

namespace {
bool no_links = false;  // as on some file systems
}
// In place of the C library's.
extern "C" int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  if (!no_links) {
    return static_cast<int>(::syscall(SYS_linkat, from_folder, from, to_folder, to, flags));
  }
  errno = EPERM;
  return -1;
}

namespace moesaic::test {
namespace {

using Kind = checkpoint::OutputTarget::Kind;

TEST(OutputFile, ALinkIsFollowedAndStays) {
  TempDir dir;
  write_bytes(dir.path("old"), "old");
  std::filesystem::create_symlink("old", dir.path("link"));
  std::filesystem::create_symlink(dir.path("link"), dir.path("far"));
  std::filesystem::create_symlink("new", dir.path("dangling"));
  std::filesystem::create_symlink("circle", dir.path("circle"));
  ASSERT_TRUE(checkpoint::write_output_text(dir.path("far"), "one").ok());
  EXPECT_EQ(read_bytes(dir.path("old")), "one");
  ASSERT_TRUE(checkpoint::write_output_text(dir.path("dangling"), "two").ok());
  EXPECT_EQ(read_bytes(dir.path("new")), "two");
  for (const char* name : {"link", "far", "dangling"}) {
    EXPECT_TRUE(std::filesystem::is_symlink(dir.path(name))) << name;
  }
  EXPECT_EQ(
      mismatch(checkpoint::write_output_text(dir.path("circle"), "x"), StatusCode::kIo, {"circle"}),
      "");
  EXPECT_EQ(dir.entries(),
            (std::vector<std::string>{"circle", "dangling", "far", "link", "new", "old"}));
}

// Also when the process is killed half-way: nothing has a name before it is whole.
TEST(OutputFile, HasNoNameBeforeItIsWhole) {
  TempDir dir;
  const int probe = ::open(dir.path().c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0600);
  if (probe < 0) GTEST_SKIP() << "the file system has no files without names";
  ::close(probe);
  write_bytes(dir.path("old"), "old");
  for (const char* name : {"old", "new"}) {
    auto one = checkpoint::OutputFile::create(*checkpoint::find_output(dir.path(name)));
    auto two = checkpoint::OutputFile::create(*checkpoint::find_output(dir.path(name)));
    ASSERT_TRUE(one.ok() && two.ok());
    ASSERT_TRUE(one->write("one", 3).ok());
    ASSERT_TRUE(two->write("other", 5).ok());
    EXPECT_EQ(dir.entries(), std::vector<std::string>{"old"});
    ASSERT_TRUE(one->commit().ok());
    EXPECT_EQ(read_bytes(dir.path(name)), "one");
    ASSERT_TRUE(two->commit().ok());
    EXPECT_EQ(read_bytes(dir.path(name)), "other");
  }
  EXPECT_EQ(dir.entries(), (std::vector<std::string>{"new", "old"}));
}

// A file system, or a sandbox, that gives no name to a file that has none: the result is copied.
TEST(OutputFile, IsCopiedWhereItCannotBeNamed) {
  TempDir dir;
  write_bytes(dir.path("old"), "old");
  ASSERT_EQ(::chmod(dir.path("old").c_str(), 0640), 0);
  const std::string text(std::size_t{3} << 20, 'x');
  no_links = true;
  for (const char* name : {"old", "new"}) {
    const Status status = checkpoint::write_output_text(dir.path(name), text + name);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  no_links = false;
  for (const char* name : {"old", "new"}) EXPECT_EQ(read_bytes(dir.path(name)), text + name);
  EXPECT_EQ(dir.entries(), (std::vector<std::string>{"new", "old"}));
  struct stat info {};
  ASSERT_EQ(::stat(dir.path("old").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0640U);
}

TEST(OutputFile, APipeGetsTheBytesAndStaysAPipe) {
  TempDir dir;
  const std::string path = dir.path("pipe");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  std::filesystem::create_symlink("pipe", dir.path("link"));
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  ASSERT_TRUE(checkpoint::write_output_text(dir.path("link"), "through").ok());
  char got[16] = {};
  EXPECT_EQ(::read(reader, got, sizeof(got)), 7);
  EXPECT_STREQ(got, "through");
  // The whole writer, too.
  const std::byte byte{1};
  const NamedTensor tensor{"w", {&byte, DType::kU8, {1}}};
  ASSERT_TRUE(write_safetensors(path, std::span(&tensor, 1)).ok());
  EXPECT_GT(::read(reader, got, sizeof(got)), 8);
  ::close(reader);
  EXPECT_EQ(checkpoint::find_output(path)->kind, Kind::kStream);
  EXPECT_EQ(dir.entries(), (std::vector<std::string>{"link", "pipe"}));
}

TEST(OutputFile, WhatAPathNames) {
  TempDir dir;
  EXPECT_EQ(checkpoint::find_output("/dev/null")->kind, Kind::kStream);
  EXPECT_EQ(checkpoint::find_output("/dev/stderr")->descriptor, 2);
  EXPECT_EQ(checkpoint::find_output(dir.path("new"))->kind, Kind::kNew);
  write_bytes(dir.path("a"), "abc");
  EXPECT_EQ(checkpoint::find_output(dir.path("a"))->kind, Kind::kFile);
  EXPECT_EQ(checkpoint::find_output(dir.path("a"))->bytes, 3U);
  EXPECT_EQ(mismatch(checkpoint::find_output(dir.path()).status(), StatusCode::kIo,
                     {"folder", "need a file"}),
            "");
  EXPECT_EQ(
      mismatch(checkpoint::find_output(dir.path("none/a")).status(), StatusCode::kIo, {"create"}),
      "");
  EXPECT_EQ(mismatch(checkpoint::find_output(dir.path("a/b")).status(), StatusCode::kIo, {"a/b"}),
            "");
  EXPECT_EQ(mismatch(checkpoint::find_output(dir.path("b/")).status(), StatusCode::kIo, {"b/"}),
            "");
  EXPECT_EQ(mismatch(checkpoint::find_output("/dev/fd/4095").status(), StatusCode::kIo, {"4095"}),
            "");
  EXPECT_EQ(checkpoint::find_output("").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(checkpoint::find_output(std::string("a\0b", 3)).status().code(),
            StatusCode::kInvalidArgument);

  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = dir.path("s");
  ASSERT_LT(name.size(), sizeof(address.sun_path));
  std::copy(name.begin(), name.end(), address.sun_path);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(socket, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(mismatch(checkpoint::find_output(name).status(), StatusCode::kIo, {"socket"}), "");
  ::close(socket);
}

TEST(OutputFile, AnOpenDescriptorIsWrittenWhereItStands) {
  TempDir dir;
  const int fd = ::open(dir.path("a").c_str(), O_WRONLY | O_CREAT, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::write(fd, "before ", 7), 7);
  for (const char* folder : {"/dev/fd/", "/proc/self/fd/"}) {
    ASSERT_TRUE(checkpoint::write_output_text(folder + std::to_string(fd), "x").ok());
  }
  ASSERT_EQ(::write(fd, " after", 6), 6) << "it stays open";
  ::close(fd);
  EXPECT_EQ(read_bytes(dir.path("a")), "before xx after");
  const int input = ::open(dir.path("a").c_str(), O_RDONLY);
  EXPECT_EQ(checkpoint::find_output("/dev/fd/" + std::to_string(input)).status().code(),
            StatusCode::kIo);
  ::close(input);
}

TEST(OutputFile, PermissionsAndOtherNamesOfAReplacedFile) {
  TempDir dir;
  write_bytes(dir.path("a"), "old");
  ASSERT_EQ(::chmod(dir.path("a").c_str(), 0640), 0);
  std::filesystem::create_hard_link(dir.path("a"), dir.path("other"));
  ASSERT_TRUE(checkpoint::write_output_text(dir.path("a"), "new").ok());
  struct stat info {};
  ASSERT_EQ(::stat(dir.path("a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640U);
  EXPECT_EQ(read_bytes(dir.path("a")), "new");
  EXPECT_EQ(read_bytes(dir.path("other")), "old");
  // As long as names go; the temporary one must fit as well.
  const std::string longest(255, 'n');
  EXPECT_TRUE(checkpoint::write_output_text(dir.path(longest), "x").ok());
}

}  // namespace
}  // namespace moesaic::test
