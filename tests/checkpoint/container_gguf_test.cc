// GGUF headers byte by byte: what a sound file is read as, and what is refused how. The files are
// built here; whole models in GGUF are in the loader's tests.
#include <gtest/gtest.h>

#include <cstring>

#include "checkpoint/container/gguf.h"
#include "checkpoint/container_support.h"
#include "quant/gguf_blocks.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}
std::string text(std::string_view s) { return raw<std::uint64_t>(s.size()) + std::string(s); }

std::string info(std::string_view name, const std::vector<std::uint64_t>& dims, std::uint32_t type,
                 std::uint64_t offset) {
  std::string bytes = text(name) + raw(static_cast<std::uint32_t>(dims.size()));
  for (const std::uint64_t dim : dims) bytes += raw(dim);
  return bytes + raw(type) + raw(offset);
}

std::string file(const std::vector<std::string>& entries, const std::vector<std::string>& infos,
                 const std::string& data, std::size_t alignment = 32) {
  std::string bytes = "GGUF" + raw<std::uint32_t>(3) + raw<std::uint64_t>(infos.size()) +
                      raw<std::uint64_t>(entries.size());
  for (const std::string& entry : entries) bytes += entry;
  for (const std::string& one : infos) bytes += one;
  bytes.append((alignment - bytes.size() % alignment) % alignment, '\0');
  return bytes + data;
}

Result<checkpoint::GgufHeader> parse_gguf(const std::string& bytes) {
  return checkpoint::parse_gguf(
      "f.gguf", checkpoint::GgufBytes(std::as_bytes(std::span(bytes.data(), bytes.size()))));
}

TEST(Gguf, MetadataOfEveryKind) {
  const auto key = [](std::string_view name, std::uint32_t kind) { return text(name) + raw(kind); };
  const std::string list = key("l", 9) + raw<std::uint32_t>(2) + raw<std::uint64_t>(2) +
                           raw<std::uint16_t>(7) + raw<std::uint16_t>(65535);
  const std::string floats =
      key("fl", 9) + raw<std::uint32_t>(6) + raw<std::uint64_t>(2) + raw(0.5F) + raw(-2.0F);
  const std::string words =
      key("w", 9) + raw<std::uint32_t>(8) + raw<std::uint64_t>(2) + text("") + text("token");
  const auto header = parse_gguf(file(
      {key("u8", 0) + raw<std::uint8_t>(255), key("i8", 1) + raw<std::int8_t>(-1),
       key("u16", 2) + raw<std::uint16_t>(65535), key("i16", 3) + raw<std::int16_t>(-2),
       key("u32", 4) + raw<std::uint32_t>(4294967295U), key("i32", 5) + raw<std::int32_t>(-3),
       key("f32", 6) + raw(1.5F), key("b", 7) + raw<std::uint8_t>(1), key("s", 8) + text("x y"),
       list, floats, words, key("u64", 10) + raw<std::uint64_t>(1ULL << 62),
       key("i64", 11) + raw<std::int64_t>(-4), key("f64", 12) + raw(2.5)},
      {}, ""));
  ASSERT_TRUE(header.ok()) << header.status().to_string();
  const auto integer = [&](const char* name) {
    return std::get<std::int64_t>(header->metadata.at(name));
  };
  EXPECT_EQ(integer("u8"), 255);
  EXPECT_EQ(integer("i8"), -1);
  EXPECT_EQ(integer("u16"), 65535);
  EXPECT_EQ(integer("i16"), -2);
  EXPECT_EQ(integer("u32"), 4294967295);
  EXPECT_EQ(integer("i32"), -3);
  EXPECT_EQ(integer("u64"), std::int64_t{1} << 62);
  EXPECT_EQ(integer("i64"), -4);
  EXPECT_EQ(std::get<double>(header->metadata.at("f32")), 1.5);
  EXPECT_EQ(std::get<double>(header->metadata.at("f64")), 2.5);
  EXPECT_TRUE(std::get<bool>(header->metadata.at("b")));
  EXPECT_EQ(std::get<std::string>(header->metadata.at("s")), "x y");
  EXPECT_EQ(std::get<checkpoint::GgufArray>(header->metadata.at("l")).integers,
            (std::vector<std::int64_t>{7, 65535}));
  EXPECT_EQ(std::get<checkpoint::GgufArray>(header->metadata.at("fl")).numbers,
            (std::vector<double>{0.5, -2.0}));
  const auto& vocabulary = std::get<checkpoint::GgufArray>(header->metadata.at("w"));
  EXPECT_EQ(vocabulary.count, 2U);
  EXPECT_FALSE(vocabulary.kept);
}

TEST(Gguf, TensorsAreTurnedOutermostFirstAndBlocksBecomeRowsOfBytes) {
  const std::string data(96 + 2 * 144, '\1');
  const auto header =
      parse_gguf(file({}, {info("a", {3, 2, 4}, 0, 0), info("b", {256, 2}, 12, 96)}, data));
  ASSERT_TRUE(header.ok()) << header.status().to_string();
  ASSERT_EQ(header->tensors.size(), 2U);
  EXPECT_EQ(header->tensors[0].shape, (Shape{4, 2, 3}));
  EXPECT_EQ(header->tensors[0].dtype, DType::kF32);
  EXPECT_EQ(header->tensors[0].block_type, quant::GgufType::kNone);
  EXPECT_EQ(header->tensors[1].shape, (Shape{2, 144}));
  EXPECT_EQ(header->tensors[1].dtype, DType::kU8);
  EXPECT_EQ(checkpoint::ggml_type_info(header->tensors[1].block_type).name, "Q4_K");
  EXPECT_EQ(header->tensors[1].begin, 96U);
}

// The last tensor may be padded or not; anything else is a file of another length.
TEST(Gguf, DataEndsWithTheLastTensor) {
  const std::vector<std::string> infos = {info("a", {3}, 0, 0)};
  for (std::size_t bytes = 0; bytes < 70; ++bytes) {
    const auto header = parse_gguf(file({}, infos, std::string(bytes, 'x')));
    EXPECT_EQ(header.ok(), bytes == 12 || bytes == 32) << bytes;
    if (!header.ok() && bytes > 0) {
      EXPECT_EQ(mismatch(header.status(), StatusCode::kCorruptFile, {"f.gguf", "data", "need 12"}),
                "");
    }
  }
}

TEST(Gguf, OffsetsFollowEachOther) {
  const std::string data(96, 'x');
  const auto pair = [&](std::uint64_t first, std::uint64_t second) {
    return parse_gguf(file({}, {info("a", {8}, 0, first), info("b", {16}, 0, second)}, data));
  };
  EXPECT_TRUE(pair(0, 32).ok());
  for (const auto& [first, second] :
       std::vector<std::pair<std::uint64_t, std::uint64_t>>{{32, 64}, {0, 64}, {0, 0}, {64, 0}}) {
    EXPECT_EQ(mismatch(pair(first, second).status(), StatusCode::kCorruptFile, {"offset", "need"}),
              "");
  }
  EXPECT_EQ(mismatch(pair(0, 33).status(), StatusCode::kCorruptFile, {"\"b\"", "alignment 32"}),
            "");
}

TEST(Gguf, DuplicatesAreRefused) {
  const std::string entry = text("k") + raw<std::uint32_t>(0) + raw<std::uint8_t>(1);
  EXPECT_EQ(mismatch(parse_gguf(file({entry, entry}, {}, "")).status(), StatusCode::kCorruptFile,
                     {"\"k\"", "twice"}),
            "");
  EXPECT_EQ(mismatch(parse_gguf(file({}, {info("a", {8}, 0, 0), info("a", {8}, 0, 32)},
                                     std::string(64, 'x')))
                         .status(),
                     StatusCode::kCorruptFile, {"\"a\"", "twice"}),
            "");
}

// Every prefix of a sound file is an error, never a read beyond it.
TEST(Gguf, EveryTruncationIsRefused) {
  const std::string whole =
      file({text("general.alignment") + raw<std::uint32_t>(4) + raw<std::uint32_t>(64),
            text("w") + raw<std::uint32_t>(9) + raw<std::uint32_t>(8) + raw<std::uint64_t>(1) +
                text("t")},
           {info("a", {4}, 0, 0), info("b", {32, 2}, 8, 64)}, std::string(64 + 68, 'x'), 64);
  // Tensors without elements: the data begin within the file although they are empty.
  const std::string empty = file({}, {info("a", {0, 4}, 0, 0)}, "");
  for (const std::string& sound : {whole, empty}) {
    ASSERT_TRUE(parse_gguf(sound).ok()) << parse_gguf(sound).status().to_string();
    for (std::size_t n = 0; n < sound.size(); ++n) {
      // Copied, so that a sanitizer sees the end.
      const auto header = parse_gguf(std::string(sound.data(), n));
      EXPECT_FALSE(header.ok()) << n;
    }
  }
}

// A flipped byte gives an error or tensors inside the file.
TEST(Gguf, FlippedBytesStayInsideTheFile) {
  const std::string whole =
      file({text("k") + raw<std::uint32_t>(4) + raw<std::uint32_t>(64)},
           {info("a", {4, 2}, 0, 0), info("b", {32, 2}, 8, 32)}, std::string(32 + 68, 'x'));
  for (std::size_t i = 0; i < whole.size() - 100; ++i) {
    for (const int bit : {0, 3, 7}) {
      std::string spoilt = whole;
      spoilt[i] = static_cast<char>(spoilt[i] ^ (1 << bit));
      const auto header = parse_gguf(spoilt);
      if (!header.ok()) continue;
      for (const checkpoint::TensorInfo& t : header->tensors) {
        EXPECT_LE(header->data_offset + t.end, spoilt.size());
      }
    }
  }
}

TEST(Gguf, FilesAreReadThroughBothAccesses) {
  TempDir dir;
  std::string data(96 + 32, '\0');
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i);
  write_bytes(dir.path("m.gguf"),
              file({}, {info("a", {3, 2, 4}, 0, 0), info("b", {2, 2}, 30, 96)}, data));
  for (const FileAccess access : {FileAccess::kMmap, FileAccess::kCopy}) {
    const auto opened = checkpoint::GgufFile::open(dir.path("m.gguf"), access);
    ASSERT_TRUE(opened.ok()) << opened.status().to_string();
    const checkpoint::TensorInfo& b = opened->tensors()[1];
    std::string rows(4, '\0');
    ASSERT_TRUE(
        opened
            ->read_rows(b, 0, 2, 1, 1, std::as_writable_bytes(std::span(rows.data(), rows.size())))
            .ok());
    EXPECT_EQ(rows, std::string({98, 99, 102, 103}));
  }
  EXPECT_TRUE(checkpoint::has_gguf_magic(dir.path("m.gguf")));
  EXPECT_FALSE(checkpoint::has_gguf_magic(dir.path("absent")));
}

// Types that are decoded take their sizes from the decoders, all others have rows of their own.
TEST(Gguf, TypesAreNamedAndMeasured) {
  for (const checkpoint::GgmlTypeInfo& want :
       std::vector<checkpoint::GgmlTypeInfo>{{0, "F32", 1, 4},
                                             {2, "Q4_0", 32, 18},
                                             {8, "Q8_0", 32, 34},
                                             {9, "Q8_1", 32, 36},
                                             {14, "Q6_K", 256, 210},
                                             {16, "IQ2_XXS", 256, 66},
                                             {27, "I64", 1, 8},
                                             {39, "MXFP4", 32, 17},
                                             {40, "NVFP4", 64, 36},
                                             {41, "Q1_0", 128, 18}}) {
    const auto got = checkpoint::find_ggml_type(want.id);
    ASSERT_TRUE(got.has_value()) << want.name;
    EXPECT_EQ(got->id, want.id);
    EXPECT_EQ(got->name, want.name);
    EXPECT_EQ(got->block_elements, want.block_elements) << want.name;
    EXPECT_EQ(got->block_bytes, want.block_bytes) << want.name;
  }
  for (const std::uint32_t removed : {4U, 5U, 31U, 36U, 42U, 255U}) {
    EXPECT_FALSE(checkpoint::find_ggml_type(removed).has_value()) << removed;
  }
}

}  // namespace
}  // namespace moesaic::test
