// Our scalar codecs as a filter, for scripts that compare them with other implementations:
//   codec_filter FORMAT decode < codes > floats     one code per 16-bit word, F32 out
//   codec_filter FORMAT encode < floats > codes
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "numerics/codec.h"

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
    {"e5m2", decode<f32_from_e5m2>, encode<e5m2_from_f32>},
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

int run(const std::string& name, const std::string& direction) {
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
