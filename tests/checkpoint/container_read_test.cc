// Opening files and copying tensors out of them, under both kinds of access.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <numeric>

#include "checkpoint/container/safetensors.h"
#include "checkpoint/container_support.h"
#include "support/random.h"
#include "support/source_folder.h"

namespace moesaic::test {
namespace {

constexpr FileAccess kBoth[] = {FileAccess::kMmap, FileAccess::kCopy};

std::span<std::byte> bytes_of(std::vector<unsigned char>& v) {
  return std::as_writable_bytes(std::span(v));
}

// a = [2, 4] bytes 0..7, b = [8] bytes 8..15.
std::string two_by_four_header() {
  return R"({"a":{"dtype":"U8","shape":[2,4],"data_offsets":[0,8]},)"
         R"("b":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}})";
}

TEST(TensorFile, ReadsThePublishedVectors) {
  TempDir dir;
  write_bytes(dir.path("a"),
              from_hex("4000000000000000") +
                  R"({"w":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[0,4]}}    )" +
                  from_hex("38b87e00"));
  for (const FileAccess access : kBoth) {
    const auto file = TensorFile::open(dir.path("a"), access);
    ASSERT_TRUE(file.ok()) << file.status().to_string();
    EXPECT_EQ(file->names(), std::vector<std::string>{"w"});
    EXPECT_TRUE(file->contains("w"));
    const auto w = file->read("w");
    ASSERT_TRUE(w.ok()) << w.status().to_string();
    EXPECT_EQ(w->dtype(), DType::kF8E4M3);
    EXPECT_EQ(w->shape(), Shape({2, 2}));
    EXPECT_EQ(std::memcmp(w->data(), from_hex("38b87e00").data(), 4), 0);
  }
}

TEST(TensorFile, UnknownNameGetsTheNearest) {
  TempDir dir;
  write_bytes(dir.path("a"), simple_file({"mlp.gate.weight", "mlp.down.weight"}));
  const auto file = TensorFile::open(dir.path("a"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(mismatch(file->read("mlp.gate.wieght").status(), StatusCode::kNotFound,
                     {"mlp.gate.wieght", "nearest", "mlp.gate.weight\""}),
            "");
  EXPECT_EQ(file->read("zzz").status().message().find("nearest"), std::string::npos);
  EXPECT_EQ(mismatch(file->read("zzz").status(), StatusCode::kNotFound,
                     {"need one of \"mlp.gate.weight\", \"mlp.down.weight\""}),
            "");
  std::vector<std::string> many;
  for (int i = 0; i < 40; ++i) many.push_back("t" + std::to_string(i) + "\\u001b");
  write_bytes(dir.path("many"), simple_file(many));
  EXPECT_EQ(mismatch(TensorFile::open(dir.path("many"))->read("zzz").status(),
                     StatusCode::kNotFound, {"\"t7\\x1b\", ... (40 in all)"}),
            "");
}

TEST(TensorFile, OtherFormatsAreNamed) {
  TempDir dir;
  const auto refusal = [&](std::string bytes) {
    bytes.resize(256, '\0');
    write_bytes(dir.path("a"), bytes);
    return TensorFile::open(dir.path("a")).status();
  };
  const auto other = StatusCode::kUnsupported;
  EXPECT_EQ(mismatch(refusal(from_hex("93") + "NUMPY" + from_hex("01 00 76 00") + "{'descr'"),
                     other, {"NumPy", "need a safetensors file"}),
            "");
  EXPECT_EQ(mismatch(refusal(from_hex("50 4b 03 04 14 00 00 00")), other, {"zip", ".npz"}), "");
  EXPECT_EQ(mismatch(refusal(from_hex("80 02 8a 0a 6c fc 9c 46")), other, {"pickle"}), "");
  EXPECT_EQ(mismatch(refusal(from_hex("89 48 44 46 0d 0a 1a 0a")), other, {"HDF5"}), "");
  EXPECT_EQ(mismatch(refusal("GGUF" + from_hex("03 00 00 00 01")), other, {"GGUF"}), "");
  EXPECT_EQ(mismatch(refusal("version https://git-lfs.github.com/spec/v1"),
                     StatusCode::kCorruptFile, {"Git LFS"}),
            "");
  EXPECT_EQ(mismatch(refusal("<!DOCTYPE html>"), StatusCode::kCorruptFile, {"HTML"}), "");
  EXPECT_EQ(mismatch(refusal("hello world"), StatusCode::kLimitExceeded, {"header too large"}), "");
}

TEST(TensorFile, ReadsUnalignedDataAndOddHeaders) {
  TempDir dir;
  const std::string header = R"({"f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},)"
                             R"("b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const float values[] = {1.5F, -2.0F};
  std::string data = "x";
  data.append(reinterpret_cast<const char*>(values), 8);
  write_bytes(dir.path("a"), container(header, data));
  for (const FileAccess access : kBoth) {
    const auto file = TensorFile::open(dir.path("a"), access);
    ASSERT_TRUE(file.ok()) << file.status().to_string();
    const auto f = file->read("f");
    ASSERT_TRUE(f.ok());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(f->data()) % 64, 0U);
    EXPECT_EQ(f->as<float>()[0], 1.5F);
    EXPECT_EQ(f->as<float>()[1], -2.0F);
    EXPECT_EQ(file->names(), (std::vector<std::string>{"b", "f"}));
  }
}

TEST(TensorFile, SystemErrors) {
  TempDir dir;
  for (const FileAccess access : kBoth) {
    EXPECT_EQ(mismatch(TensorFile::open(dir.path("none"), access).status(), StatusCode::kNotFound,
                       {dir.path("none"), "open"}),
              "");
    EXPECT_EQ(mismatch(TensorFile::open(dir.path(), access).status(), StatusCode::kIo,
                       {"folder", "regular file"}),
              "");
    EXPECT_EQ(mismatch(TensorFile::open("/dev/null", access).status(), StatusCode::kIo,
                       {"/dev/null", "regular file"}),
              "");
    // A name with a NUL would silently open something else.
    EXPECT_EQ(mismatch(TensorFile::open(std::string("a\0b", 3), access).status(),
                       StatusCode::kInvalidArgument, {"path", "NUL"}),
              "");
  }
  ASSERT_EQ(::mkfifo(dir.path("pipe").c_str(), 0600), 0);  // must not wait for a writer
  EXPECT_EQ(mismatch(TensorFile::open(dir.path("pipe")).status(), StatusCode::kIo, {"pipe"}), "");
}

TEST(TensorFile, RankAboveOursIsListedButNotRead) {
  TempDir dir;
  write_bytes(dir.path("a"),
              container(R"({"a":{"dtype":"U8","shape":[1,1,1,1,2,1],"data_offsets":[0,2]},)"
                        R"("b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
                        "123"));
  const auto file = TensorFile::open(dir.path("a"));
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_TRUE(file->contains("a"));
  EXPECT_EQ(
      mismatch(file->read("a").status(), StatusCode::kLimitExceeded, {"\"a\"", "rank", "got 6"}),
      "");
  EXPECT_TRUE(file->read("b").ok());
}

TEST(SafetensorsFile, AFileThatShrinksIsAnErrorNotASignal) {
  TempDir dir;
  const std::uint64_t bytes = 1 << 20;
  const std::string header = R"({"a":{"dtype":"U8","shape":[1048576],"data_offsets":[0,1048576]}})";
  for (const FileAccess access : kBoth) {
    write_bytes(dir.path("a"), container(header, std::string(bytes, 'x')));
    const auto file = checkpoint::SafetensorsFile::open(dir.path("a"), access);
    ASSERT_TRUE(file.ok());
    ASSERT_EQ(::truncate(dir.path("a").c_str(), 100), 0);
    EXPECT_EQ(mismatch(file->read_tensor(*file->find("a")).status(), StatusCode::kIo,
                       {dir.path("a"), "shrank"}),
              "");
  }
}

TEST(SafetensorsFile, ViewNeedsAMapping) {
  TempDir dir;
  write_bytes(dir.path("a"), simple_file({"a", "b"}));
  const auto mapped = checkpoint::SafetensorsFile::open(dir.path("a"), FileAccess::kMmap);
  ASSERT_TRUE(mapped.ok());
  const auto view = mapped->view(*mapped->find("b"));
  ASSERT_TRUE(view.ok());
  ASSERT_EQ(view->size(), 1U);
  EXPECT_EQ((*view)[0], std::byte{2});
  mapped->drop_residency(*mapped->find("b"));
  EXPECT_EQ((*view)[0], std::byte{2});  // comes back from the cache
  const auto copied = checkpoint::SafetensorsFile::open(dir.path("a"), FileAccess::kCopy);
  ASSERT_TRUE(copied.ok());
  EXPECT_EQ(mismatch(copied->view(*copied->find("b")).status(), StatusCode::kUnsupported,
                     {"\"b\"", "kMmap"}),
            "");
}

TEST(SafetensorsFile, RangesStayInsideTheTensor) {
  TempDir dir;
  write_bytes(dir.path("a"), container(two_by_four_header(), "01234567abcdefgh"));
  const auto file = checkpoint::SafetensorsFile::open(dir.path("a"), FileAccess::kCopy);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const checkpoint::TensorInfo& b = *file->find("b");
  std::vector<unsigned char> got(3);
  ASSERT_TRUE(file->read_range(b, 2, bytes_of(got)).ok());
  EXPECT_EQ(std::string(got.begin(), got.end()), "cde");
  for (const std::uint64_t offset : {std::uint64_t{6}, std::uint64_t{9}, ~std::uint64_t{0}}) {
    EXPECT_EQ(mismatch(file->read_range(b, offset, bytes_of(got)), StatusCode::kInvalidArgument,
                       {"\"b\"", "range", "8 bytes"}),
              "");
  }
  EXPECT_EQ(
      mismatch(file->read(b, bytes_of(got)), StatusCode::kInvalidArgument, {"got 3", "need 8"}),
      "");
}

// Every rectangle of a [R, C] tensor of 16-bit elements against plain indexing. The wide one takes
// the piecewise path, the narrow ones the buffered path.
void check_rectangles(std::int64_t rows, std::int64_t cols, std::int64_t step_r,
                      std::int64_t step_c) {
  TempDir dir;
  std::vector<std::uint16_t> values(static_cast<std::size_t>(rows * cols));
  std::iota(values.begin(), values.end(), std::uint16_t{1});
  const Shape shape({rows, cols});
  const NamedTensor tensor{
      "w", ConstTensorView(reinterpret_cast<const std::byte*>(values.data()), DType::kU16, shape)};
  ASSERT_TRUE(write_safetensors(dir.path("a"), std::span(&tensor, 1)).ok());
  const auto file = checkpoint::SafetensorsFile::open(dir.path("a"), FileAccess::kMmap);
  ASSERT_TRUE(file.ok());
  const checkpoint::TensorInfo& info = *file->find("w");
  for (std::int64_t r = 0; r <= rows; r += step_r) {
    for (std::int64_t nr = 0; nr <= rows - r; nr += step_r) {
      for (std::int64_t c = 0; c <= cols; c += step_c) {
        for (std::int64_t nc = 0; nc <= cols - c; nc += step_c) {
          std::vector<std::uint16_t> got(static_cast<std::size_t>(nr * nc), 0xFFFF);
          const Status s =
              file->read_rows(info, r, nr, c, nc, std::as_writable_bytes(std::span(got)));
          ASSERT_TRUE(s.ok()) << s.to_string();
          for (std::int64_t i = 0; i < nr; ++i) {
            for (std::int64_t j = 0; j < nc; ++j) {
              ASSERT_EQ(got[static_cast<std::size_t>(i * nc + j)],
                        values[static_cast<std::size_t>((r + i) * cols + c + j)])
                  << r << "+" << nr << ", " << c << "+" << nc << " at " << i << "," << j;
            }
          }
        }
      }
    }
  }
}

TEST(ReadRows, EveryRectangleOfASmallMatrix) { check_rectangles(5, 7, 1, 1); }
TEST(ReadRows, WidePiecesAreReadOneByOne) { check_rectangles(5, 12000, 2, 5000); }
TEST(ReadRows, ManyNarrowRowsThroughTheBuffer) { check_rectangles(40000, 30, 19999, 11); }
TEST(ReadRows, RowsWiderThanTheBuffer) { check_rectangles(3, 600000, 1, 250000); }

TEST(ReadRows, LeadingDimensionsAreRows) {
  TempDir dir;
  write_bytes(
      dir.path("a"),
      container(R"({"w":{"dtype":"U8","shape":[2,2,3],"data_offsets":[0,12]}})", "abcdefghijkl"));
  const auto file = checkpoint::SafetensorsFile::open(dir.path("a"), FileAccess::kCopy);
  ASSERT_TRUE(file.ok());
  std::vector<unsigned char> got(4);
  ASSERT_TRUE(file->read_rows(*file->find("w"), 2, 2, 1, 2, bytes_of(got)).ok());
  EXPECT_EQ(std::string(got.begin(), got.end()), "hikl");
}

TEST(ReadRows, SubByteColumnsMustFallOnBytes) {
  TempDir dir;
  write_bytes(dir.path("a"), container(R"({"w":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]},)"
                                       R"("o":{"dtype":"F4","shape":[2,3],"data_offsets":[4,7]}})",
                                       from_hex("11223344 556677")));
  const auto file = checkpoint::SafetensorsFile::open(dir.path("a"), FileAccess::kCopy);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  std::vector<unsigned char> got(2);
  ASSERT_TRUE(file->read_rows(*file->find("w"), 0, 2, 2, 2, bytes_of(got)).ok());
  EXPECT_EQ(got, (std::vector<unsigned char>{0x22, 0x44}));
  EXPECT_EQ(mismatch(file->read_rows(*file->find("w"), 0, 2, 1, 2, bytes_of(got)),
                     StatusCode::kInvalidLayout, {"\"w\"", "columns 1+2", "4-bit"}),
            "");
  // Rows of 12 bits: the whole is fine, one row is not, rows that end between bytes are not.
  std::vector<unsigned char> whole(3);
  ASSERT_TRUE(file->read_rows(*file->find("o"), 0, 2, 0, 3, bytes_of(whole)).ok());
  EXPECT_EQ(file->read_rows(*file->find("o"), 0, 1, 0, 3, bytes_of(got)).code(),
            StatusCode::kInvalidLayout);
  EXPECT_EQ(file->read_rows(*file->find("o"), 0, 2, 0, 2, bytes_of(got)).code(),
            StatusCode::kInvalidLayout);
}

TEST(ReadRows, RefusesWhatIsOutside) {
  TempDir dir;
  write_bytes(dir.path("a"), container(two_by_four_header(), "01234567abcdefgh"));
  const auto file = checkpoint::SafetensorsFile::open(dir.path("a"), FileAccess::kCopy);
  ASSERT_TRUE(file.ok());
  const checkpoint::TensorInfo& a = *file->find("a");
  const std::int64_t max = std::numeric_limits<std::int64_t>::max();
  std::vector<unsigned char> got(4);
  const std::int64_t outside[][4] = {{0, 3, 0, 1},   {2, 1, 0, 1},   {0, 1, 3, 2},  {0, 1, 4, 1},
                                     {-1, 1, 0, 1},  {0, -1, 0, 1},  {0, 1, -1, 1}, {0, 1, 0, -1},
                                     {max, 1, 0, 1}, {1, max, 0, 1}, {0, 1, 1, max}};
  for (const auto& r : outside) {
    EXPECT_EQ(mismatch(file->read_rows(a, r[0], r[1], r[2], r[3], bytes_of(got)),
                       StatusCode::kInvalidArgument, {"\"a\"", "slice", "[2, 4]"}),
              "");
  }
  EXPECT_EQ(mismatch(file->read_rows(a, 0, 2, 0, 3, bytes_of(got)), StatusCode::kInvalidArgument,
                     {"destination", "got 4", "need 6"}),
            "");
  EXPECT_EQ(file->read_rows(a, 0, 0, 0, 3, bytes_of(got)).code(), StatusCode::kInvalidArgument);
}

TEST(SafetensorsFile, BundledCheckpointsOpen) {
  const std::string folder = test::source_folder() + "/testdata/models";
  int files = 0;
  for (const auto& e : std::filesystem::recursive_directory_iterator(folder)) {
    if (e.path().extension() != ".safetensors") continue;
    ++files;
    const auto file = checkpoint::SafetensorsFile::open(e.path().string(), FileAccess::kMmap);
    ASSERT_TRUE(file.ok()) << file.status().to_string();
    EXPECT_FALSE(file->tensors().empty());
    // Copies and views are the same bytes.
    const checkpoint::TensorInfo& last = file->tensors().back();
    const auto tensor = file->read_tensor(last);
    const auto view = file->view(last);
    ASSERT_TRUE(tensor.ok() && view.ok());
    EXPECT_EQ(std::memcmp(tensor->data(), view->data(), view->size()), 0);
  }
  EXPECT_GE(files, 10);
}

}  // namespace
}  // namespace moesaic::test
