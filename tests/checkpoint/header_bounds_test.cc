// Headers of the largest accepted size, each opened in a process of its own: at most 2 s of
// processor time and a peak memory of a few times the header.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>

#include "checkpoint/container_support.h"
#include "checkpoint/safetensors.h"

namespace moesaic::test {
namespace {

constexpr double kMaxSeconds = 2.0;
constexpr double kMaxMemoryRatio = 8.0;  // of the header's size

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kInstrumented = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif
#else
constexpr bool kInstrumented = false;
#endif

// Sanitizers change time and memory several times over: a tenth of the size, and no bounds.
constexpr std::uint64_t kBytes = kInstrumented ? kMaxHeaderBytes / 10 : kMaxHeaderBytes;

// Writes a header of exactly kBytes piece by piece: this process must stay small, because its
// children start with its memory.
class HeaderWriter {
 public:
  explicit HeaderWriter(const std::string& path) : out_(path, std::ios::binary) {
    for (unsigned i = 0; i < 8; ++i) out_.put(static_cast<char>(kBytes >> (8 * i) & 0xFF));
  }
  void add(std::string_view text) {
    out_.write(text.data(), static_cast<std::streamsize>(text.size()));
    written_ += text.size();
  }
  std::uint64_t left() const { return kBytes - written_; }
  // Repeats `text` while more than `reserve` bytes stay free.
  void repeat(std::string_view text, std::uint64_t reserve) {
    while (left() >= text.size() + reserve) add(text);
  }
  void pad_and_close(std::uint64_t data_bytes) {
    repeat("                                                                ", 0);
    repeat(" ", 0);
    const std::string zeros(1 << 16, '\0');
    while (data_bytes > 0) {
      const std::uint64_t n = std::min<std::uint64_t>(data_bytes, zeros.size());
      out_.write(zeros.data(), static_cast<std::streamsize>(n));
      data_bytes -= n;
    }
    out_.close();
  }

 private:
  std::ofstream out_;
  std::uint64_t written_ = 0;
};

void open_in_child(const char* name, const std::string& path, StatusCode want) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto file = SafetensorsFile::open(path, FileAccess::kCopy);
    const StatusCode code = file.ok() ? StatusCode::kOk : file.status().code();
    if (code != want)
      std::fprintf(stderr, "%s\n", file.ok() ? "ok" : file.status().to_string().c_str());
    ::_exit(code == want ? 0 : 1);
  }
  int status = 0;
  rusage usage{};
  ASSERT_EQ(::wait4(child, &status, 0, &usage), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << name << ": status " << status;
  const double seconds =
      static_cast<double>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
      1e-6 * static_cast<double>(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  const double ratio = static_cast<double>(usage.ru_maxrss) * 1024 / static_cast<double>(kBytes);
  std::printf("%-28s %5.2f s, peak memory %4.1f x header\n", name, seconds, ratio);
  if (kInstrumented) return;  // sanitizers change both
  EXPECT_LT(seconds, kMaxSeconds) << name;
  EXPECT_LT(ratio, kMaxMemoryRatio) << name;
}

using Fill = std::function<std::uint64_t(HeaderWriter&)>;  // returns the number of data bytes

void check(const char* name, StatusCode want, const Fill& fill) {
  TempDir dir;
  HeaderWriter writer(dir.path("a"));
  writer.pad_and_close(fill(writer));
  open_in_child(name, dir.path("a"), want);
}

// The shortest entries there can be, hence the most tensors: 1.5 million.
std::uint64_t many_tensors(HeaderWriter& w, bool backwards, bool duplicate) {
  constexpr std::uint64_t kCount = kBytes / 200 * 3;
  char text[160];
  w.add("{");
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const std::uint64_t at = backwards ? kCount - 1 - i : i;
    const std::uint64_t id = duplicate && i + 1 == kCount ? 0 : i;
    std::snprintf(text, sizeof(text),
                  R"(%s"%llx":{"dtype":"U8","shape":[],"data_offsets":[%llu,%llu]})",
                  i == 0 ? "" : ",", static_cast<unsigned long long>(id),
                  static_cast<unsigned long long>(at), static_cast<unsigned long long>(at + 1));
    w.add(text);
  }
  w.add("}");
  EXPECT_LT(w.left(), kBytes / 10);  // the header is nearly full of entries, yet they fit
  return kCount;
}

TEST(HeaderBounds, MostTensors) {
  check("most tensors", StatusCode::kOk, [](auto& w) { return many_tensors(w, false, false); });
}
TEST(HeaderBounds, MostTensorsBackwards) {
  check("most tensors, backwards", StatusCode::kOk,
        [](auto& w) { return many_tensors(w, true, false); });
}
TEST(HeaderBounds, LateDuplicate) {
  check("late duplicate", StatusCode::kCorruptFile,
        [](auto& w) { return many_tensors(w, false, true); });
}

constexpr std::string_view kEntry = R"(:{"dtype":"U8","shape":[],"data_offsets":[0,1]})";

TEST(HeaderBounds, OneName) {
  check("one name", StatusCode::kOk, [](auto& w) {
    w.add("{\"");
    w.repeat("nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn", 100);
    w.add("\"");
    w.add(kEntry);
    w.add("}");
    return std::uint64_t{1};
  });
}

TEST(HeaderBounds, OneEscapedName) {
  check("one escaped name", StatusCode::kOk, [](auto& w) {
    w.add("{\"");
    w.repeat("\\u00e9", 100);
    w.add("\"");
    w.add(kEntry);
    w.add("}");
    return std::uint64_t{1};
  });
}

// `open` + many `item` + `close`, as an unknown member of a good entry or as the whole header.
void repeated(const char* name, StatusCode want, std::string_view open, std::string_view item,
              std::string_view close, std::uint64_t data_bytes = 0) {
  check(name, want, [&](auto& w) {
    w.add(open);
    w.repeat(item, 100);
    w.add(close);
    return data_bytes;
  });
}

TEST(HeaderBounds, Nesting) {
  repeated("nesting", StatusCode::kLimitExceeded, R"({"a":{"x":)", "[[[[[[[[[[[[[[[[", "}}");
}
TEST(HeaderBounds, LongNumber) {
  repeated("integer of 10^8 digits", StatusCode::kCorruptFile, R"({"a":{"shape":[)",
           "1111111111111111", "]}}");
}
TEST(HeaderBounds, LongFraction) {
  repeated("fraction of 10^8 digits", StatusCode::kCorruptFile, R"({"a":{"shape":[0.)",
           "0101010101010101", "]}}");
}
TEST(HeaderBounds, LongShape) {
  repeated("shape of 5x10^7 dimensions", StatusCode::kOk,
           R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[1)", ",1", "]}}", 1);
}
TEST(HeaderBounds, MetadataValue) {
  repeated("one metadata value", StatusCode::kOk, R"({"__metadata__":{"a":")", "vvvvvvvvvvvvvvvv",
           R"("}})");
}
TEST(HeaderBounds, UnknownStrings) {
  repeated("unknown strings", StatusCode::kOk,
           R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[],"x":[0)", R"(,"")", "]}}", 1);
}
TEST(HeaderBounds, UnknownObjects) {
  std::string item = ",{";
  for (int i = 0; i < 64; ++i) item += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
  item += "}";
  check("unknown objects", StatusCode::kOk, [&](auto& w) {
    w.add(R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[],"x":[0)");
    w.repeat(item, 100);
    w.add("]}}");
    return std::uint64_t{1};
  });
}
TEST(HeaderBounds, InvalidUtf8AtTheEnd) {
  repeated("late bad UTF-8", StatusCode::kCorruptFile, "{\"", "nnnnnnnnnnnnnnnn", "\xff\":0}");
}

}  // namespace
}  // namespace moesaic::test
