// Marlin's order of integer weights, scales and zero points.

#include <algorithm>
#include <cstring>
#include <string>

#include "core/fault.h"
#include "moesaic/interop/layouts.h"
#include "quant/arguments.h"

namespace moesaic {
namespace {

constexpr std::int64_t kChunk = 1024;

// The kernel unpacks the even values of a word with one shift, then the odd ones.
std::int64_t interleave(std::int64_t p, int bits) {
  constexpr std::array<std::int64_t, 8> kFour = {0, 2, 4, 6, 1, 3, 5, 7};
  constexpr std::array<std::int64_t, 4> kEight = {0, 2, 1, 3};
  return bits == 4 ? p / 8 * 8 + kFour[static_cast<std::size_t>(p % 8)]
                   : p / 4 * 4 + kEight[static_cast<std::size_t>(p % 4)];
}

Status expect_marlin_bits(int bits) {
  if (bits == 4 || bits == 8) return {};
  return Status(StatusCode::kInvalidArgument,
                "bits: got " + std::to_string(bits) + ", need 4 or 8");
}
Status expect_multiple(std::string_view field, std::int64_t value, std::int64_t factor) {
  if (value % factor == 0) return {};
  return Status(StatusCode::kInvalidShape, std::string(field) + ": got " + std::to_string(value) +
                                               ", need a multiple of " + std::to_string(factor));
}
Status expect_fits(std::string_view field, const ConstTensorView& codes, int bits) {
  const std::int64_t cols = codes.dim(1);
  for (std::int64_t i = 0; i < codes.dim(0) * cols; ++i) {
    if (codes.as<std::uint8_t>()[i] < 1 << bits) continue;
    return Status(StatusCode::kInvalidArgument,
                  std::string(field) + ": row " + std::to_string(i / cols) + ", column " +
                      std::to_string(i % cols) + ": got " +
                      std::to_string(codes.as<std::uint8_t>()[i]) + ", need 0 .. " +
                      std::to_string((1 << bits) - 1));
  }
  return {};
}

// Reads or writes value `i` of a stream of words.
std::uint8_t get_value(const std::uint32_t* words, std::int64_t i, int bits) {
  const std::int64_t per_word = 32 / bits;
  return static_cast<std::uint8_t>(words[i / per_word] >> (bits * (i % per_word)) &
                                   ((1U << bits) - 1U));
}
void add_value(std::uint32_t* words, std::int64_t i, int bits, std::uint8_t value) {
  const std::int64_t per_word = 32 / bits;
  words[i / per_word] |= static_cast<std::uint32_t>(value) << (bits * (i % per_word));
}

// Calls visit(index into codes [N, K], place in the stream of packed values) for every weight.
template <class Visit>
void for_weights(std::int64_t n_size, std::int64_t k_size, int bits, Visit&& visit) {
  const auto perm = marlin_permutation(bits);
  for (std::int64_t chunk = 0; chunk < n_size * k_size / kChunk; ++chunk) {
    const std::int64_t k0 = chunk / (n_size / 64) * 16;
    const std::int64_t n0 = chunk % (n_size / 64) * 64;
    for (std::int64_t p = 0; p < kChunk; ++p) {
      const std::int64_t v = perm[static_cast<std::size_t>(p)];
      const std::int64_t k = k0 + v % 256 / 16;
      const std::int64_t n = n0 + v / 256 * 16 + v % 16;
      visit(n * k_size + k, chunk * kChunk + p);
    }
  }
}

Status check_weight(const ConstTensorView& codes, int bits, const ConstTensorView& packed,
                    bool to_packed) {
  MOESAIC_RETURN_IF_ERROR(expect_marlin_bits(bits));
  MOESAIC_RETURN_IF_ERROR(quant::expect_matrix("codes", codes));
  MOESAIC_RETURN_IF_ERROR(contiguous_bytes(DType::kU64, codes.shape).status());
  MOESAIC_RETURN_IF_ERROR(expect_multiple("codes: N", codes.dim(0), 64));
  MOESAIC_RETURN_IF_ERROR(expect_multiple("codes: K", codes.dim(1), 16));
  return quant::check_arguments({
      {"codes", codes, quant::accept(DType::kU8), codes.shape, !to_packed},
      {"packed", packed, quant::kWords, {codes.dim(1) / 16, codes.dim(0) / 2 * bits}, to_packed},
  });
}

Status check_zeros(const ConstTensorView& zeros, int bits, const ConstTensorView& packed,
                   bool to_packed) {
  MOESAIC_RETURN_IF_ERROR(expect_marlin_bits(bits));
  MOESAIC_RETURN_IF_ERROR(quant::expect_matrix("zeros", zeros));
  MOESAIC_RETURN_IF_ERROR(contiguous_bytes(DType::kU64, zeros.shape).status());
  MOESAIC_RETURN_IF_ERROR(expect_multiple("zeros: N", zeros.dim(0), 64));
  return quant::check_arguments({
      {"zeros", zeros, quant::accept(DType::kU8), zeros.shape, !to_packed},
      {"packed", packed, quant::kWords, {zeros.dim(1), zeros.dim(0) / 32 * bits}, to_packed},
  });
}

// Calls visit(index into zeros [N, G], place in the stream of packed values).
template <class Visit>
void for_zeros(const Shape& zeros, int bits, Visit&& visit) {
  const auto perm = marlin_group_scale_permutation();
  const std::int64_t n_size = zeros[0];
  const std::int64_t groups = zeros[1];
  for (std::int64_t g = 0; n_size > 0 && g < groups; ++g) {
    for (std::int64_t p = 0; p < n_size; ++p) {
      const std::int64_t permuted = interleave(p, bits);
      const std::int64_t n = permuted / 64 * 64 + perm[static_cast<std::size_t>(permuted % 64)];
      visit(n * groups + g, g * n_size + p);
    }
  }
}

// out[place] = in[perm] (to Marlin) or out[perm] = in[place] (back), element by element of `bytes`.
Status move_scales(const ConstTensorView& in, bool grouped, const TensorView& out, bool to_marlin) {
  MOESAIC_RETURN_IF_ERROR(quant::expect_matrix("scales", in));
  const std::int64_t step = grouped ? 64 : 32;
  MOESAIC_RETURN_IF_ERROR(expect_multiple("scales: N", in.dim(1), step));
  constexpr quant::DTypeMask kScales = quant::kPlainFloats;
  MOESAIC_RETURN_IF_ERROR(quant::check_arguments({
      {"scales", in, kScales, in.shape},
      {"out", out, kScales & quant::accept(in.dtype), in.shape, true},
  }));
  const auto group_perm = marlin_group_scale_permutation();
  const auto channel_perm = marlin_channel_scale_permutation();
  const auto bytes = static_cast<std::size_t>(dtype_bits(in.dtype) / 8);
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, in.shape.num_elements());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto p = static_cast<std::size_t>(i % step);
    const std::int64_t other = i - i % step + (grouped ? group_perm[p] : channel_perm[p]);
    const std::int64_t from = to_marlin ? other : i;
    const std::int64_t to = to_marlin ? i : other;
    std::memcpy(out.data + static_cast<std::size_t>(to) * bytes,
                in.data + static_cast<std::size_t>(from) * bytes, bytes);
  }
  return {};
}

}  // namespace

std::array<std::int16_t, 1024> marlin_permutation(int bits) {
  std::array<std::int16_t, kChunk> plain{};
  std::size_t at = 0;
  for (int t = 0; t < 32; ++t) {
    // Rows and columns of a lane's eight values in an MMA operand of 16 x 16.
    const int rows[] = {2 * (t % 4), 2 * (t % 4) + 1, 2 * (t % 4) + 8, 2 * (t % 4) + 9};
    for (int j = 0; j < 4; ++j) {
      for (const int block : {0, 1}) {
        for (const int row : rows) {
          plain[at++] = static_cast<std::int16_t>(16 * row + t / 4 + 8 * block + 256 * j);
        }
      }
    }
  }
  if (MOESAIC_FAULT(quant_marlin_no_interleave)) return plain;
  std::array<std::int16_t, kChunk> perm{};
  for (std::size_t p = 0; p < perm.size(); ++p) {
    perm[p] = plain[static_cast<std::size_t>(interleave(static_cast<std::int64_t>(p), bits))];
  }
  return perm;
}

std::array<std::int16_t, 64> marlin_group_scale_permutation() {
  std::array<std::int16_t, 64> perm{};
  for (std::size_t p = 0; p < 64; ++p) perm[p] = static_cast<std::int16_t>(p / 8 + 8 * (p % 8));
  return perm;
}

std::array<std::int16_t, 32> marlin_channel_scale_permutation() {
  constexpr std::array<std::size_t, 8> kFirst = {0, 1, 8, 9, 16, 17, 24, 25};
  std::array<std::int16_t, 32> perm{};
  for (std::size_t p = 0; p < 32; ++p) {
    perm[p] = static_cast<std::int16_t>(2 * (p / 8) + kFirst[p % 8]);
  }
  return perm;
}

Status pack_marlin_weight(ConstTensorView codes, int bits, TensorView packed) {
  MOESAIC_RETURN_IF_ERROR(check_weight(codes, bits, packed, true));
  MOESAIC_RETURN_IF_ERROR(expect_fits("codes", codes, bits));
  auto* words = packed.as<std::uint32_t>();
  std::fill_n(words, packed.dim(0) * packed.dim(1), 0U);
  for_weights(codes.dim(0), codes.dim(1), bits, [&](std::int64_t from, std::int64_t to) {
    add_value(words, to, bits, codes.as<std::uint8_t>()[from]);
  });
  return {};
}

Status unpack_marlin_weight(ConstTensorView packed, int bits, TensorView codes) {
  MOESAIC_RETURN_IF_ERROR(check_weight(codes, bits, packed, false));
  for_weights(codes.dim(0), codes.dim(1), bits, [&](std::int64_t to, std::int64_t from) {
    codes.as<std::uint8_t>()[to] = get_value(packed.as<std::uint32_t>(), from, bits);
  });
  return {};
}

Status to_marlin_scales(ConstTensorView scales, bool grouped, TensorView out) {
  return move_scales(scales, grouped, out, true);
}
Status from_marlin_scales(ConstTensorView scales, bool grouped, TensorView out) {
  return move_scales(scales, grouped, out, false);
}

Status pack_marlin_zeros(ConstTensorView zeros, int bits, TensorView packed) {
  MOESAIC_RETURN_IF_ERROR(check_zeros(zeros, bits, packed, true));
  MOESAIC_RETURN_IF_ERROR(expect_fits("zeros", zeros, bits));
  auto* words = packed.as<std::uint32_t>();
  std::fill_n(words, packed.dim(0) * packed.dim(1), 0U);
  for_zeros(zeros.shape, bits, [&](std::int64_t from, std::int64_t to) {
    add_value(words, to, bits, zeros.as<std::uint8_t>()[from]);
  });
  return {};
}

Status unpack_marlin_zeros(ConstTensorView packed, int bits, TensorView zeros) {
  MOESAIC_RETURN_IF_ERROR(check_zeros(zeros, bits, packed, false));
  for_zeros(zeros.shape, bits, [&](std::int64_t to, std::int64_t from) {
    zeros.as<std::uint8_t>()[to] = get_value(packed.as<std::uint32_t>(), from, bits);
  });
  return {};
}

}  // namespace moesaic
