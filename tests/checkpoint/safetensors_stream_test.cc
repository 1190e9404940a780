#include "checkpoint/container/safetensors_stream.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "moesaic/checkpoint.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

std::string folder() {
  const std::string path = testing::TempDir() + "stream-" + std::to_string(::getpid());
  std::filesystem::create_directories(path);
  return path;
}
std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Pieces in any order give the bytes of the whole-file writer.
TEST(SafetensorsStream, SameBytesAsTheWholeFileWriter) {
  test::Rng rng(1);
  const Tensor a = test::random_normal(rng, DType::kBF16, {5, 7});
  const Tensor b = test::random_normal(rng, DType::kF32, {3});
  Tensor c = Tensor::zeros(DType::kU8, {2, 2, 9}).value();
  for (int i = 0; i < 36; ++i) c.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(i * 7);
  const Tensor empty = Tensor::zeros(DType::kF32, {0, 4}).value();
  const std::pair<std::string, std::string> metadata[] = {{"format", "pt"}};
  const std::string dir = folder();
  const NamedTensor whole[] = {
      {"z.a", a.view()}, {"b", b.view()}, {"a.c", c.view()}, {"none", empty.view()}};
  ASSERT_TRUE(write_safetensors(dir + "/whole", whole, metadata).ok());
  const checkpoint::TensorSpec specs[] = {{"z.a", DType::kBF16, {5, 7}},
                                          {"b", DType::kF32, {3}},
                                          {"a.c", DType::kU8, {2, 2, 9}},
                                          {"none", DType::kF32, {0, 4}}};
  auto stream = checkpoint::SafetensorsStream::create(dir + "/pieces", specs, metadata);
  ASSERT_TRUE(stream.ok()) << stream.status().message();
  ASSERT_TRUE(stream->write("a.c", 18, {c.data() + 18, 18}).ok());
  ASSERT_TRUE(stream->write("b", b.view()).ok());
  ASSERT_TRUE(stream->write("a.c", 0, {c.data(), 18}).ok());
  ASSERT_TRUE(stream->write("z.a", a.view()).ok());
  const Status done = stream->finish();
  ASSERT_TRUE(done.ok()) << done.message();
  EXPECT_EQ(bytes_of(dir + "/pieces"), bytes_of(dir + "/whole"));
  std::filesystem::remove_all(dir);
}

TEST(SafetensorsStream, Misuse) {
  const std::string dir = folder();
  const checkpoint::TensorSpec specs[] = {{"a", DType::kU8, {4}}, {"b", DType::kU8, {2}}};
  auto stream = checkpoint::SafetensorsStream::create(dir + "/x", specs);
  ASSERT_TRUE(stream.ok());
  const std::byte data[8] = {};
  expect_refusal(stream->write("c", 0, data), StatusCode::kNotFound, {"\"c\"", "announced"});
  expect_refusal(stream->write("a", 1, {data, 4}), StatusCode::kInvalidArgument,
                 {"\"a\"", "1 .. 5", "at most 4"});
  const Tensor wide = Tensor::zeros(DType::kU8, {5}).value();
  expect_refusal(stream->write("a", wide.view()), StatusCode::kInvalidShape, {"a", "[5]", "[4]"});
  ASSERT_TRUE(stream->write("a", 0, {data, 4}).ok());
  expect_refusal(stream->finish(), StatusCode::kInternal, {"\"b\"", "got 0", "need 2"});
  expect_refusal(checkpoint::SafetensorsStream::create(dir + "/x", specs).status(), StatusCode::kIo,
                 {"create"});
  const checkpoint::TensorSpec twice[] = {{"a", DType::kU8, {4}}, {"a", DType::kF32, {2}}};
  expect_refusal(checkpoint::SafetensorsStream::create(dir + "/y", twice).status(),
                 StatusCode::kInvalidArgument, {"given twice"});
  const checkpoint::TensorSpec in_memory[] = {{"a", DType::kI4, {4}}};
  expect_refusal(checkpoint::SafetensorsStream::create(dir + "/z", in_memory).status(),
                 StatusCode::kInvalidArgument, {"I4", "files do not have"});
  EXPECT_FALSE(std::filesystem::exists(dir + "/y"));
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace moesaic
