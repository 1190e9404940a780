// Our scalar codecs as a filter, for scripts that compare them with other implementations:
//   codec_filter FORMAT decode < codes > floats     one code per 16-bit word, F32 out
//   codec_filter FORMAT encode < floats > codes
//   codec_filter gguf NUMBER < blocks > floats      blocks of the GGUF type of that number
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "numerics/codec.h"
#include "quant/gguf_values.h"

namespace moesaic {
namespace {

struct Codec {
  const char* name;
  float (*decode)(std::uint16_t code);
  std::uint16_t (*encode)(float x);  // nullptr: only read
};
template <auto Decode>
float decode(std::uint16_t code) {
  return Decode(static_cast<std::uint8_t>(code));
}
template <auto Encode>
std::uint16_t encode(float x) {
  return Encode(x);
}
constexpr Codec kCodecs[] = {
    {"bf16", f32_from_bf16, bf16_from_f32},
    {"f16", f32_from_f16, f16_from_f32},
    {"e4m3", decode<f32_from_e4m3>, encode<e4m3_from_f32>},
    {"e5m2", decode<f32_from_e5m2>, nullptr},
    {"e2m1", decode<f32_from_e2m1>, encode<e2m1_from_f32>},
    {"e8m0", decode<f32_from_e8m0>, nullptr},
    {"e4m3fnuz", decode<f32_from_e4m3fnuz>, nullptr},
    {"e5m2fnuz", decode<f32_from_e5m2fnuz>, nullptr},
};

template <class In, class Out>
int filter(Out (*convert)(In)) {
  In in{};
  while (std::fread(&in, sizeof(in), 1, stdin) == 1) {
    const Out out = convert(in);
    if (std::fwrite(&out, sizeof(out), 1, stdout) != 1) return 1;
  }
  return 0;
}

int decode_blocks(std::uint32_t id) {
  std::string bytes;
  for (int c = std::getchar(); c != EOF; c = std::getchar()) bytes += static_cast<char>(c);
  const quant::GgufTypeInfo* info = quant::gguf_type_info(id);
  const auto size = static_cast<std::int64_t>(bytes.size());
  if (info == nullptr || size % info->block_bytes != 0) return 2;
  const ConstTensorView blocks(reinterpret_cast<const std::byte*>(bytes.data()), DType::kU8,
                               {1, size});
  const Result<Tensor> out =
      test::gguf_values(info->type, blocks, size / info->block_bytes * info->block_elems);
  if (!out.ok()) std::fprintf(stderr, "%s\n", out.status().to_string().c_str());
  if (!out.ok()) return 1;
  const auto count = static_cast<std::size_t>(out->shape()[1]);
  return std::fwrite(out->data(), sizeof(float), count, stdout) == count ? 0 : 1;
}

int run(const std::string& name, const std::string& direction) {
  if (name == "gguf")
    return decode_blocks(static_cast<std::uint32_t>(std::atoi(direction.c_str())));
  for (const Codec& codec : kCodecs) {
    if (name != codec.name) continue;
    if (direction == "decode") return filter(codec.decode);
    if (direction == "encode" && codec.encode != nullptr) return filter(codec.encode);
  }
  std::fprintf(stderr, "usage: codec_filter FORMAT encode|decode\n");
  return 2;
}

}  // namespace
}  // namespace moesaic

int main(int argc, char** argv) { return argc == 3 ? moesaic::run(argv[1], argv[2]) : 2; }
