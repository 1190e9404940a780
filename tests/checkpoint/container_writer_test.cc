#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "checkpoint/container/safetensors.h"
#include "checkpoint/container_support.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

std::uint32_t crc32(std::string_view bytes) {
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

ConstTensorView view(const std::string& bytes, DType dtype, const Shape& shape) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), dtype, shape};
}

TEST(Writer, ReferenceOrderByteForByte) {
  TempDir dir;
  const std::string scale = from_hex("0000003f");
  const std::string gate = from_hex("803f00c0");
  const std::string w1 = from_hex("38b87e00");
  const std::string nothing;
  // Given in another order than the file's.
  const std::vector<NamedTensor> tensors = {
      {"experts.0.w1.weight", view(w1, DType::kF8E4M3, {2, 2})},
      {"gate.weight", view(gate, DType::kBF16, {1, 2})},
      {"experts.0.w1.weight_scale_inv", view(scale, DType::kF32, {1, 1})},
      {"empty", view(nothing, DType::kBF16, {0, 4})},
  };
  const std::pair<std::string, std::string> format{"format", "pt"};
  const Status s = write_safetensors(dir.path("a"), tensors, std::span(&format, 1));
  ASSERT_TRUE(s.ok()) << s.to_string();
  const std::string file = read_bytes(dir.path("a"));
  EXPECT_EQ(file.size(), 340U);
  EXPECT_EQ(file.substr(0, 8), from_hex("4001000000000000"));
  EXPECT_EQ(file.substr(328), scale + gate + w1);
  EXPECT_EQ(crc32(file), 0x4FEB1787U);
  EXPECT_EQ(dir.entries(), std::vector<std::string>{"a"});
  const auto back = TensorFile::open(dir.path("a"));
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(back->names(), (std::vector<std::string>{"experts.0.w1.weight_scale_inv", "empty",
                                                     "gate.weight", "experts.0.w1.weight"}));
}

TEST(Writer, EmptyFile) {
  TempDir dir;
  ASSERT_TRUE(write_safetensors(dir.path("a"), {}).ok());
  EXPECT_EQ(read_bytes(dir.path("a")), from_hex("08000000000000007b7d202020202020"));
}

TEST(Writer, RoundTripOfEveryTypeAndAwkwardNames) {
  TempDir dir;
  std::string bytes(256, '\0');
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < 22; ++i) {
    const auto dtype = static_cast<DType>(i);
    tensors.push_back({std::string(dtype_name(dtype)), view(bytes, dtype, {1, 4, 2})});
  }
  tensors.push_back({"scalar", view(bytes, DType::kF64, {})});
  const std::string awkward = "quote\" back\\ new\nline \x01 \x7f \xc3\xa9 \xf0\x9f\x98\x80";
  tensors.push_back({awkward, view(bytes, DType::kU8, {3})});
  const Status s = write_safetensors(dir.path("a"), tensors);
  ASSERT_TRUE(s.ok()) << s.to_string();
  const auto file = TensorFile::open(dir.path("a"), FileAccess::kCopy);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(file->names().size(), tensors.size());
  for (const NamedTensor& t : tensors) {
    const auto got = file->read(t.name);
    ASSERT_TRUE(got.ok()) << got.status().to_string();
    EXPECT_EQ(got->dtype(), t.tensor.dtype);
    EXPECT_EQ(got->shape(), t.tensor.shape);
    EXPECT_EQ(std::memcmp(got->data(), bytes.data(), static_cast<std::size_t>(got->bytes())), 0);
  }
}

TEST(Writer, RefusesBadArgumentsAndLeavesNothing) {
  TempDir dir;
  const std::string bytes(64, 'x');
  const ConstTensorView ok = view(bytes, DType::kU8, {4});
  const auto refused = [&](std::vector<NamedTensor> tensors) {
    return write_safetensors(dir.path("a"), tensors);
  };
  const auto argument = StatusCode::kInvalidArgument;
  EXPECT_EQ(mismatch(refused({{"", ok}}), argument, {"name", "empty"}), "");
  EXPECT_EQ(mismatch(refused({{"w", ok}, {"w", view(bytes, DType::kF32, {2})}}), argument,
                     {"\"w\"", "twice"}),
            "");
  EXPECT_EQ(mismatch(refused({{"__metadata__", ok}}), argument, {"reserved"}), "");
  ConstTensorView of_gpu = ok;
  of_gpu.device = Device::cuda(0);
  EXPECT_EQ(mismatch(refused({{"w", of_gpu}}), argument, {"w", "cuda:0", "cpu"}), "");
  EXPECT_EQ(mismatch(refused({{"a\xff", ok}}), argument, {"UTF-8"}), "");
  EXPECT_EQ(mismatch(refused({{std::string("a\0b", 3), ok}}), argument, {"NUL"}), "");
  EXPECT_EQ(mismatch(refused({{"n", {nullptr, DType::kU8, {4}}}}), argument, {"\"n\"", "no data"}),
            "");
  ConstTensorView strided = view(bytes, DType::kU8, {4, 4});
  strided.strides[0] = 8;
  EXPECT_EQ(refused({{"s", strided}}).code(), StatusCode::kInvalidLayout);
  EXPECT_EQ(refused({{"odd", view(bytes, DType::kF4E2M1, {3})}}).code(), StatusCode::kInvalidShape);
  const std::vector<std::pair<std::string, std::string>> twice = {{"k", "1"}, {"k", "2"}};
  EXPECT_EQ(mismatch(write_safetensors(dir.path("a"), {}, twice), argument, {"\"k\"", "twice"}),
            "");
  EXPECT_EQ(dir.entries(), std::vector<std::string>{});
}

TEST(Writer, FailureKeepsTheOlderFile) {
  TempDir dir;
  const std::string bytes(4, 'x');
  const NamedTensor t{"w", view(bytes, DType::kU8, {4})};
  ASSERT_TRUE(write_safetensors(dir.path("a"), std::span(&t, 1)).ok());
  const std::string before = read_bytes(dir.path("a"));
  const NamedTensor bad{"", t.tensor};
  EXPECT_FALSE(write_safetensors(dir.path("a"), std::span(&bad, 1)).ok());
  EXPECT_EQ(read_bytes(dir.path("a")), before);
  // A folder in the way.
  ASSERT_EQ(::mkdir(dir.path("folder").c_str(), 0700), 0);
  write_bytes(dir.path("folder") + "/x", "x");
  EXPECT_EQ(mismatch(write_safetensors(dir.path("folder"), std::span(&t, 1)), StatusCode::kIo,
                     {dir.path("folder"), "folder", "need a file"}),
            "");
  EXPECT_EQ(mismatch(write_safetensors(dir.path("none/b"), std::span(&t, 1)), StatusCode::kIo,
                     {"none/b", "create"}),
            "");
  EXPECT_EQ(dir.entries(), (std::vector<std::string>{"a", "folder"}));
}

TEST(Writer, ReplacesAnOlderFile) {
  TempDir dir;
  write_bytes(dir.path("a"), "old");
  ASSERT_TRUE(write_safetensors(dir.path("a"), {}).ok());
  EXPECT_TRUE(TensorFile::open(dir.path("a")).ok());
}

}  // namespace
}  // namespace moesaic::test
