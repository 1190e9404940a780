#include "quant/int_packing.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/fault.h"
#include "numerics/integer.h"
#include "quant/arguments.h"

namespace moesaic::quant {
namespace {

// Codes per side of a transposing block: 4 KiB, inside L1.
constexpr std::int64_t kTransposeBlock = 64;

// Lines of packed codes inside a matrix of words: code i of line l. `awq` interleaves the eight
// nibbles of each word.
struct PackedLines {
  int bits;
  std::int64_t line_stride;  // words between the beginnings of two lines
  std::int64_t word_stride;  // words between consecutive words of a line
  bool awq = false;

  // Bit position of code i in its line's stream.
  std::int64_t bit_of(std::int64_t i) const {
    if (!awq) return i * bits;
    // Nibble of the word that holds column r of eight: the inverse of (0,2,4,6,1,3,5,7).
    constexpr std::array<std::int64_t, 8> kNibble = {0, 4, 1, 5, 2, 6, 3, 7};
    const bool plain = MOESAIC_FAULT(quant_awq_plain_order);
    return (i / 8) * 32 + (plain ? i % 8 : kNibble[static_cast<std::size_t>(i % 8)]) * bits;
  }
  std::uint32_t read(const std::uint32_t* words, std::int64_t line, std::int64_t i) const {
    const std::int64_t bit = bit_of(i);
    const std::uint32_t* word = words + line * line_stride + bit / 32 * word_stride;
    const int shift = static_cast<int>(bit % 32);
    std::uint64_t value = *word >> shift;
    // Only a code that crosses has a next word; the last one may be the last word of the tensor.
    if (shift + bits > 32) value |= std::uint64_t{word[word_stride]} << (32 - shift);
    return static_cast<std::uint32_t>(value) & ((1U << bits) - 1U);
  }
  // Adds a code to words that are 0 at its place.
  void write(std::uint32_t* words, std::int64_t line, std::int64_t i, std::uint32_t code) const {
    const std::int64_t bit = bit_of(i);
    std::uint32_t* word = words + line * line_stride + bit / 32 * word_stride;
    const int shift = static_cast<int>(bit % 32);
    *word |= code << shift;
    if (shift + bits > 32) word[word_stride] |= code >> (32 - shift);
  }
};

// Where the code of bytes[row][col] lies: line `row`, place `col`, or the other way round.
enum class LineIs : std::uint8_t { kRow, kColumn };

// Visits all (row, col) of a matrix in square blocks, so that neither side strides far.
template <class Visit>
void for_blocks(std::int64_t rows, std::int64_t cols, Visit&& visit) {
  if (cols == 0) return;  // rows may then be any number
  for (std::int64_t r0 = 0; r0 < rows; r0 += kTransposeBlock) {
    for (std::int64_t c0 = 0; c0 < cols; c0 += kTransposeBlock) {
      for (std::int64_t r = r0; r < std::min(r0 + kTransposeBlock, rows); ++r) {
        for (std::int64_t c = c0; c < std::min(c0 + kTransposeBlock, cols); ++c) visit(r, c);
      }
    }
  }
}

void unpack(const ConstTensorView& words, const PackedLines& lines, LineIs line_is,
            const TensorView& bytes, int add) {
  const auto* in = words.as<std::uint32_t>();
  auto* out = bytes.as<std::uint8_t>();
  const std::int64_t cols = bytes.dim(1);
  for_blocks(bytes.dim(0), cols, [&](std::int64_t r, std::int64_t c) {
    const std::uint32_t code =
        line_is == LineIs::kRow ? lines.read(in, r, c) : lines.read(in, c, r);
    out[r * cols + c] = static_cast<std::uint8_t>(static_cast<int>(code) + add);
  });
}

Status expect_fitting(const ConstTensorView& codes, int bits) {
  const int largest = (1 << bits) - 1;
  const std::int64_t cols = codes.dim(1);
  for (std::int64_t i = 0; i < codes.dim(0) * cols; ++i) {
    const int code = codes.as<std::uint8_t>()[i];
    if (code <= largest) continue;
    return Status(StatusCode::kInvalidArgument,
                  "codes: row " + std::to_string(i / cols) + ", column " +
                      std::to_string(i % cols) + ": got " + std::to_string(code) + ", need 0 .. " +
                      std::to_string(largest) + " for " + std::to_string(bits) + " bits");
  }
  return {};
}

Status expect_packed_bits(int bits, bool gptq) {
  const bool ok = gptq ? bits == 2 || bits == 3 || bits == 4 || bits == 8 : bits >= 1 && bits <= 8;
  if (ok) return {};
  return Status(StatusCode::kInvalidArgument, "bits: got " + std::to_string(bits) + ", need " +
                                                  (gptq ? "2, 3, 4 or 8" : "1 .. 8"));
}

// How one stored tensor is laid out, given the shape of its bytes [rows, cols].
struct Packing {
  PackedLines lines;
  LineIs line_is;
  Shape words;
};
// Lines are the rows of the bytes and of the words (compressed-tensors weight).
Packing rows_along_rows(const Shape& bytes, int bits) {
  const std::int64_t width = words_for_codes(bytes[1], bits);
  return {{bits, width, 1}, LineIs::kRow, {bytes[0], width}};
}
// Lines are the rows of the bytes, the columns of the words (GPTQ weight).
Packing rows_along_columns(const Shape& bytes, int bits) {
  const std::int64_t height = words_for_codes(bytes[1], bits);
  return {{bits, 1, bytes[0]}, LineIs::kRow, {height, bytes[0]}};
}
// Lines are the columns of the bytes, the rows of the words (GPTQ zeros, all of AWQ).
Packing columns_along_rows(const Shape& bytes, int bits, bool awq = false) {
  const std::int64_t width = words_for_codes(bytes[0], bits);
  return {{bits, width, 1, awq}, LineIs::kColumn, {bytes[1], width}};
}
// Lines are the columns of the bytes and of the words (compressed-tensors zeros).
Packing columns_along_columns(const Shape& bytes, int bits) {
  const std::int64_t height = words_for_codes(bytes[0], bits);
  return {{bits, 1, bytes[1]}, LineIs::kColumn, {height, bytes[1]}};
}

// Rank 2 and small enough that a count of bits cannot overflow.
Status expect_codes(std::string_view field, const ConstTensorView& t) {
  MOESAIC_RETURN_IF_ERROR(expect_matrix(field, t));
  return contiguous_bytes(DType::kU64, t.shape).status();
}

// One of the tensors that files hold: what its two forms are called and how it lies.
enum class PackedBy : std::uint8_t { kGptq, kAwq, kCompressed };
struct StoredTensor {
  PackedBy kind;
  const char* words;
  const char* bytes;
  Packing (*layout)(const Shape& bytes, int bits);
};
Packing awq_columns(const Shape& bytes, int bits) { return columns_along_rows(bytes, bits, true); }
Packing gptq_columns(const Shape& bytes, int bits) { return columns_along_rows(bytes, bits); }
constexpr StoredTensor kGptqWeight = {PackedBy::kGptq, "qweight", "codes", rows_along_columns};
constexpr StoredTensor kGptqZeros = {PackedBy::kGptq, "qzeros", "zeros", gptq_columns};
constexpr StoredTensor kAwqWeight = {PackedBy::kAwq, "qweight", "codes", awq_columns};
constexpr StoredTensor kAwqZeros = {PackedBy::kAwq, "qzeros", "zeros", awq_columns};
constexpr StoredTensor kCtWeight = {PackedBy::kCompressed, "weight_packed", "codes",
                                    rows_along_rows};
constexpr StoredTensor kCtZeros = {PackedBy::kCompressed, "weight_zero_point", "zeros",
                                   columns_along_columns};

Status check_bytes(const StoredTensor& t, int bits, const ConstTensorView& bytes) {
  MOESAIC_RETURN_IF_ERROR(expect_packed_bits(bits, t.kind == PackedBy::kGptq));
  MOESAIC_RETURN_IF_ERROR(expect_codes(t.bytes, bytes));
  if (t.kind != PackedBy::kAwq || bytes.dim(0) % 8 == 0) return {};
  return Status(StatusCode::kInvalidShape, std::string(t.bytes) +
                                               ": got N = " + std::to_string(bytes.dim(0)) +
                                               ", need a multiple of 8");
}

Status unpack_tensor(const StoredTensor& t, const ConstTensorView& words, int bits,
                     const TensorView& bytes, int add = 0) {
  MOESAIC_RETURN_IF_ERROR(check_bytes(t, bits, bytes));
  const Packing p = t.layout(bytes.shape, bits);
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {t.words, words, kWords, p.words},
      {t.bytes, bytes, accept(DType::kU8), bytes.shape, true},
  }));
  unpack(words, p.lines, p.line_is, bytes, add);
  return {};
}

constexpr int kAwqBits = 4;

}  // namespace

Status unpack_gptq_weight(ConstTensorView qweight, int bits, TensorView codes) {
  return unpack_tensor(kGptqWeight, qweight, bits, codes);
}
Status unpack_gptq_zeros(ConstTensorView qzeros, int bits, GptqZeroFormat format,
                         TensorView zeros) {
  const int add = format == GptqZeroFormat::kMinusOne && !MOESAIC_FAULT(quant_gptq_zero_plain);
  MOESAIC_RETURN_IF_ERROR(unpack_tensor(kGptqZeros, qzeros, bits, zeros, add));
  if (add == 0 || bits != 8) return {};
  // 255 + 1 has wrapped to 0, which "z - 1" cannot store otherwise.
  for (std::int64_t i = 0; i < zeros.dim(0) * zeros.dim(1); ++i) {
    if (zeros.as<std::uint8_t>()[i] != 0) continue;
    return Status(StatusCode::kInvalidArgument, "qzeros: row " + std::to_string(i / zeros.dim(1)) +
                                                    ", group " + std::to_string(i % zeros.dim(1)) +
                                                    ": got a stored 255, need 0 .. 254");
  }
  return {};
}
Status unpack_awq_weight(ConstTensorView qweight, TensorView codes) {
  return unpack_tensor(kAwqWeight, qweight, kAwqBits, codes);
}
Status unpack_awq_zeros(ConstTensorView qzeros, TensorView zeros) {
  return unpack_tensor(kAwqZeros, qzeros, kAwqBits, zeros);
}
Status unpack_ct_weight(ConstTensorView packed, int bits, TensorView codes) {
  return unpack_tensor(kCtWeight, packed, bits, codes);
}
Status pack_ct_weight(ConstTensorView codes, int bits, TensorView packed) {
  MOESAIC_RETURN_IF_ERROR(check_bytes(kCtWeight, bits, codes));
  const Packing p = kCtWeight.layout(codes.shape, bits);
  MOESAIC_RETURN_IF_ERROR(check_arguments({
      {kCtWeight.bytes, codes, accept(DType::kU8), codes.shape},
      {kCtWeight.words, packed, kWords, p.words, true},
  }));
  MOESAIC_RETURN_IF_ERROR(expect_fitting(codes, bits));
  auto* words = packed.as<std::uint32_t>();
  std::fill_n(words, p.words[0] * p.words[1], 0U);
  const std::int64_t columns = codes.dim(1);
  for (std::int64_t i = 0; i < codes.dim(0) * columns; ++i) {
    p.lines.write(words, i / columns, i % columns, codes.as<std::uint8_t>()[i]);
  }
  return {};
}
Status unpack_ct_zeros(ConstTensorView packed, int bits, TensorView zeros) {
  return unpack_tensor(kCtZeros, packed, bits, zeros);
}
namespace {

// Checks codes [.., K] against nibbles [.., K/2]; *count is the number of codes.
Status check_nibbles(const ConstTensorView& codes, const ConstTensorView& nibbles, int bias,
                     std::int64_t* count) {
  if (bias != 0 && bias != 8) {
    return Status(StatusCode::kInvalidArgument,
                  "bias: got " + std::to_string(bias) + ", need 0 or 8");
  }
  const int rank = codes.rank();
  if (rank < 1 || codes.dim(rank - 1) % 2 != 0) {
    return Status(StatusCode::kInvalidShape, "codes: got " + codes.shape.to_string() +
                                                 ", need an even last dimension (two per byte)");
  }
  std::array<std::int64_t, kMaxRank> dims{};
  for (int i = 0; i < rank; ++i) dims[static_cast<std::size_t>(i)] = codes.dim(i);
  const bool counts_codes = nibbles.dtype == DType::kI4 || nibbles.dtype == DType::kU4;
  if (!counts_codes) dims[static_cast<std::size_t>(rank - 1)] /= 2;
  MOESAIC_ASSIGN_OR_RETURN(const Shape packed,
                           Shape::from({dims.data(), static_cast<std::size_t>(rank)}));
  MOESAIC_ASSIGN_OR_RETURN(*count, codes.shape.num_elements());
  return check_arguments({
      {"codes", codes, accept(DType::kU8, DType::kI8), codes.shape},
      {"nibbles", nibbles, accept(DType::kU8, DType::kI4, DType::kU4), packed, true},
  });
}

Status out_of_range(std::string_view field, std::int64_t index, int got, int low, int high) {
  return Status(StatusCode::kInvalidArgument,
                std::string(field) + ": element " + std::to_string(index) + ": got " +
                    std::to_string(got) + ", need " + std::to_string(low) + " .. " +
                    std::to_string(high));
}

}  // namespace

Status pack_nibbles(ConstTensorView codes, int bias, TensorView nibbles) {
  std::int64_t count = 0;
  MOESAIC_RETURN_IF_ERROR(check_nibbles(codes, nibbles, bias, &count));
  const bool is_signed = codes.dtype == DType::kI8;
  // Unsigned codes with a bias are two's complement afterwards, without one they stay unsigned.
  const int low = is_signed ? -8 : 0;
  const int high = is_signed ? 7 : 15;
  if (is_signed && bias != 0) {
    return Status(StatusCode::kInvalidArgument, "bias: got 8 for signed codes, need 0");
  }
  for (std::int64_t i = 0; i < count; i += 2) {
    unsigned byte = 0;
    for (int j = 0; j < 2; ++j) {
      const int code =
          is_signed ? int{codes.as<std::int8_t>()[i + j]} : int{codes.as<std::uint8_t>()[i + j]};
      if (code < low || code > high) return out_of_range("codes", i + j, code, low, high);
      byte |= (static_cast<unsigned>(code - bias) & 0xFU) << (4 * j);
    }
    nibbles.as<std::uint8_t>()[i / 2] = static_cast<std::uint8_t>(byte);
  }
  return {};
}

Status subtract_bias(ConstTensorView codes, int bias, TensorView values) {
  MOESAIC_RETURN_IF_ERROR(check_arguments({{"codes", codes, accept(DType::kU8), codes.shape}}));
  MOESAIC_RETURN_IF_ERROR(check_arguments({{"values", values, accept(DType::kI8), codes.shape}}));
  MOESAIC_ASSIGN_OR_RETURN(const std::int64_t count, codes.shape.num_elements());
  for (std::int64_t i = 0; i < count; ++i) {
    const int value = codes.as<std::uint8_t>()[i] - bias;
    if (value < -128 || value > 127) {
      return out_of_range("codes", i, codes.as<std::uint8_t>()[i], bias - 128, bias + 127);
    }
    values.as<std::int8_t>()[i] = static_cast<std::int8_t>(value);
  }
  return {};
}

}  // namespace moesaic::quant
