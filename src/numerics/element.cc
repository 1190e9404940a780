#include "numerics/element.h"

#include <cassert>
#include <cstring>
#include <limits>

#include "numerics/e8m0.h"
#include "numerics/float_codec.h"
#include "numerics/integer.h"

namespace moesaic {
namespace {

// memcpy rather than a cast: views of file mappings may be unaligned for their dtype.
template <class T>
T load(const void* base, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(base) + index * std::int64_t{sizeof(T)},
              sizeof(T));
  return value;
}
template <class T>
void store(void* base, std::int64_t index, T value) {
  std::memcpy(static_cast<std::byte*>(base) + index * std::int64_t{sizeof(T)}, &value, sizeof(T));
}

}  // namespace

bool is_loadable_float(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kBF16:
    case DType::kF16:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kF8E4M3Fnuz:
    case DType::kF8E5M2Fnuz:
    case DType::kF8E8M0:
    case DType::kF4E2M1:
      return true;
    default:
      return false;
  }
}

bool is_storable_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

void load_as_f32(const void* base, DType dtype, std::int64_t index, std::int64_t count,
                 float* out) {
  const auto each = [&](auto&& element) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = element(index + i);
  };
  switch (dtype) {
    case DType::kF64:
      return each([&](std::int64_t i) { return static_cast<float>(load<double>(base, i)); });
    case DType::kF32:
      return each([&](std::int64_t i) { return load<float>(base, i); });
    case DType::kBF16:
      return each([&](std::int64_t i) { return f32_from_bf16(load<std::uint16_t>(base, i)); });
    case DType::kF16:
      return each([&](std::int64_t i) { return f32_from_f16(load<std::uint16_t>(base, i)); });
    case DType::kF8E4M3:
      return each([&](std::int64_t i) { return f32_from_e4m3(load<std::uint8_t>(base, i)); });
    case DType::kF8E5M2:
      return each([&](std::int64_t i) { return f32_from_e5m2(load<std::uint8_t>(base, i)); });
    case DType::kF8E4M3Fnuz:
      return each([&](std::int64_t i) { return f32_from_e4m3fnuz(load<std::uint8_t>(base, i)); });
    case DType::kF8E5M2Fnuz:
      return each([&](std::int64_t i) { return f32_from_e5m2fnuz(load<std::uint8_t>(base, i)); });
    case DType::kF8E8M0:
      return each([&](std::int64_t i) { return f32_from_e8m0(load<std::uint8_t>(base, i)); });
    case DType::kF4E2M1:
      return each([&](std::int64_t i) {
        return f32_from_e2m1(nibble_at(static_cast<const std::uint8_t*>(base), i));
      });
    default:
      assert(false && "load_as_f32: not a floating dtype");
      return each([](std::int64_t) { return std::numeric_limits<float>::quiet_NaN(); });
  }
}

float load_as_f32(const void* base, DType dtype, std::int64_t index) {
  float value = 0;
  load_as_f32(base, dtype, index, 1, &value);
  return value;
}

void store_from_f32(void* base, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::kF32:
      return store(base, index, value);
    case DType::kBF16:
      return store(base, index, bf16_from_f32(value));
    case DType::kF16:
      return store(base, index, f16_from_f32(value));
    default:
      assert(false && "store_from_f32: not F32, BF16 or F16");
  }
}

}  // namespace moesaic
