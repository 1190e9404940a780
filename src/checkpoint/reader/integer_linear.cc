#include "checkpoint/reader/integer_linear.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "checkpoint/container/names.h"
#include "checkpoint/reader/value_checks.h"
#include "core/checked.h"
#include "core/fault.h"
#include "numerics/element.h"
#include "quant/act_order.h"
#include "quant/int_packing.h"

namespace moesaic::checkpoint {
namespace {

// How a format lays its integers into words.
struct WordLayout {
  Status (*weight)(ConstTensorView words, int bits, TensorView codes);
  Status (*zeros)(ConstTensorView words, const LinearFormat& format, TensorView zeros);
  bool by_groups;  // scales are [groups, rows], else [rows, groups]
};

Status gptq_zeros(ConstTensorView words, const LinearFormat& format, TensorView zeros) {
  const bool less_one =
      format.zeros_minus_one && !MOESAIC_FAULT(checkpoint_gptq_zero_not_incremented);
  return quant::unpack_gptq_zeros(
      words, format.bits,
      less_one ? quant::GptqZeroFormat::kMinusOne : quant::GptqZeroFormat::kPlain, zeros);
}

// AWQ has 4 bits.
constexpr WordLayout kGptqWords = {quant::unpack_gptq_weight, gptq_zeros, true};
constexpr WordLayout kAwqWords = {[](ConstTensorView words, int, TensorView codes) {
                                    return quant::unpack_awq_weight(words, codes);
                                  },
                                  [](ConstTensorView words, const LinearFormat&, TensorView zeros) {
                                    return quant::unpack_awq_zeros(words, zeros);
                                  },
                                  true};
constexpr WordLayout kPackedWords = {
    quant::unpack_ct_weight,
    [](ConstTensorView words, const LinearFormat& format, TensorView zeros) {
      return quant::unpack_ct_zeros(words, format.bits, zeros);
    },
    false};

const WordLayout& words_of(StoredFormat format) {
  if (format == StoredFormat::kGptq) return kGptqWords;
  return format == StoredFormat::kAwq ? kAwqWords : kPackedWords;
}

class IntegerReader {
 public:
  IntegerReader(const MlpTensors& tensors, Projection projection, const LinearFormat& format,
                std::int64_t rows, std::int64_t columns)
      : tensors_(tensors),
        projection_(projection),
        format_(format),
        words_(words_of(format.stored)) {
    out_.rows = rows;
    out_.columns = columns;
    out_.groups = format.group_size > 0 ? ceil_div(columns, format.group_size) : 1;
  }

  Result<IntegerLinear> run() {
    MOESAIC_RETURN_IF_ERROR(check_shape_tensor());
    MOESAIC_RETURN_IF_ERROR(check_zero_bias());
    MOESAIC_RETURN_IF_ERROR(read_codes());
    MOESAIC_RETURN_IF_ERROR(read_zeros());
    MOESAIC_RETURN_IF_ERROR(read_group_index());
    MOESAIC_RETURN_IF_ERROR(read_scales());
    return std::move(out_);
  }

 private:
  const std::optional<ShardSet::Located>& stored(TensorKind kind) const {
    return tensors_.of(kind)[static_cast<std::size_t>(projection_)];
  }
  const std::string& name(TensorKind kind) const { return stored(kind)->info->name; }
  Result<Tensor> read(TensorKind kind) const {
    return stored(kind)->file->read_tensor(*stored(kind)->info);
  }
  Status corrupt(TensorKind kind, std::string_view text) const {
    return {StatusCode::kCorruptFile, fmt::format("{}: {}", quote_name(name(kind)), text)};
  }

  Status check_shape_tensor() const {
    if (!stored(TensorKind::kPackedShape)) return {};
    MOESAIC_ASSIGN_OR_RETURN(const Tensor shape, read(TensorKind::kPackedShape));
    const auto at = [&](int i) {
      return shape.dtype() == DType::kI64 ? shape.as<std::int64_t>()[i]
                                          : std::int64_t{shape.as<std::int32_t>()[i]};
    };
    if (at(0) == out_.rows && at(1) == out_.columns) return {};
    return corrupt(TensorKind::kPackedShape, fmt::format("got [{}, {}], need [{}, {}]", at(0),
                                                         at(1), out_.rows, out_.columns));
  }

  Status check_zero_bias() const {
    if (!stored(TensorKind::kZeroBias)) return {};
    MOESAIC_ASSIGN_OR_RETURN(const Tensor bias, read(TensorKind::kZeroBias));
    for (std::int64_t i = 0; i < out_.rows; ++i) {
      const float value = load_as_f32(bias.data(), bias.dtype(), i);
      if (value == 0) continue;
      return {StatusCode::kUnsupported,
              fmt::format("{}: got {} at row {}, need zeros: experts of this family have no bias",
                          quote_name(name(TensorKind::kZeroBias)), value, i)};
    }
    return {};
  }

  Status read_codes() {
    MOESAIC_ASSIGN_OR_RETURN(const Tensor words, read(TensorKind::kWeight));
    MOESAIC_ASSIGN_OR_RETURN(out_.codes,
                             Tensor::uninitialized(DType::kU8, {out_.rows, out_.columns}));
    if (format_.byte_codes) return read_byte_codes(words);
    return words_.weight(words.view(), format_.bits, out_.codes.view());
  }

  // Signed integers of `bits` bits, one per byte.
  Status read_byte_codes(const Tensor& bytes) {
    const int bias = 1 << (format_.bits - 1);
    const auto* from = bytes.as<std::int8_t>();
    auto* to = out_.codes.as<std::uint8_t>();
    for (std::int64_t i = 0; i < out_.rows * out_.columns; ++i) {
      if (from[i] < -bias || from[i] >= bias) {
        return corrupt(
            TensorKind::kWeight,
            fmt::format("got {} at [{}, {}], need {} to {} for {} bits", from[i], i / out_.columns,
                        i % out_.columns, -bias, bias - 1, format_.bits));
      }
      to[i] = static_cast<std::uint8_t>(from[i] + bias);
    }
    return {};
  }

  Status read_zeros() {
    if (!stored(TensorKind::kZero)) return {};
    MOESAIC_ASSIGN_OR_RETURN(const Tensor words, read(TensorKind::kZero));
    MOESAIC_ASSIGN_OR_RETURN(Tensor zeros,
                             Tensor::uninitialized(DType::kU8, {out_.rows, out_.groups}));
    const Status status = words_.zeros(words.view(), format_, zeros.view());
    if (!status.ok()) return corrupt(TensorKind::kZero, status.message());
    if (format_.zero_points) {
      out_.zeros = std::move(zeros);
      return {};
    }
    // Symmetric files hold the fixed zero point all the same.
    const int fixed = 1 << (format_.bits - 1);
    const auto* z = zeros.as<std::uint8_t>();
    const auto* end = z + zeros.bytes();
    const auto* odd = std::find_if(z, end, [&](std::uint8_t v) { return v != fixed; });
    if (odd == end) return {};
    const std::int64_t at = odd - z;
    return corrupt(TensorKind::kZero,
                   fmt::format("got the zero point {} at row {} group {}, need {} as the "
                               "configuration says symmetric",
                               *odd, at / out_.groups, at % out_.groups, fixed));
  }

  // GPTQ and AWQ store [groups, rows], compressed-tensors [rows, groups]. Behind the group index, which
  // says where the weights of a group are.
  Status read_scales() {
    MOESAIC_ASSIGN_OR_RETURN(const Tensor scale, read(TensorKind::kScale));
    const std::int64_t rows = out_.rows, groups = out_.groups;
    out_.scales.resize(static_cast<std::size_t>(rows * groups));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t g = 0; g < groups; ++g) {
        out_.scales[static_cast<std::size_t>(r * groups + g)] = load_as_f32(
            scale.data(), scale.dtype(), words_.by_groups ? g * rows + r : r * groups + g);
      }
    }
    // Negative ones of activations that are quantised as well: split_int4_fp8_scales says no.
    return check_f32_scales(
        {name(TensorKind::kScale)}, out_.scales.data(), rows, groups,
        [&](std::int64_t r, std::int64_t g) { return group_is_zero(r, g); }, ScaleSigns::kEither);
  }

  // Whether all codes of the group are the zero point.
  bool group_is_zero(std::int64_t row, std::int64_t group) const {
    const std::int64_t size = format_.group_size > 0 ? format_.group_size : out_.columns;
    const std::uint8_t zero = out_.zeros.present()
                                  ? out_.zeros.as<std::uint8_t>()[row * out_.groups + group]
                                  : static_cast<std::uint8_t>(1 << (format_.bits - 1));
    const auto* codes = out_.codes.as<std::uint8_t>() + row * out_.columns;
    for (std::int64_t c = group * size; c < std::min((group + 1) * size, out_.columns); ++c) {
      const bool in_order = out_.perm.empty() || MOESAIC_FAULT(checkpoint_forget_act_order);
      if (codes[in_order ? c : out_.perm[static_cast<std::size_t>(c)]] != zero) return false;
    }
    return true;
  }

  Status read_group_index() {
    if (!stored(TensorKind::kGroupIndex)) return {};
    MOESAIC_ASSIGN_OR_RETURN(const Tensor index, read(TensorKind::kGroupIndex));
    const Status range = quant::check_group_index(index.view(), out_.groups);
    if (!range.ok()) return corrupt(TensorKind::kGroupIndex, range.message());
    if (quant::is_plain_group_index(index.view(), format_.group_size)) return {};
    if (!format_.act_order) {
      return corrupt(TensorKind::kGroupIndex,
                     "columns are not in the order of their groups, need act-order (desc_act) in "
                     "the configuration");
    }
    out_.perm.resize(static_cast<std::size_t>(out_.columns));
    const TensorView perm(reinterpret_cast<std::byte*>(out_.perm.data()), DType::kI32,
                          {out_.columns});
    MOESAIC_RETURN_IF_ERROR(quant::sort_columns_by_group(index.view(), out_.groups, perm));
    if (quant::sorted_groups_are_regular(index.view(), perm, format_.group_size)) return {};
    return {StatusCode::kUnsupported,
            fmt::format("{}: groups of uneven size, need {} columns in each",
                        quote_name(name(TensorKind::kGroupIndex)), format_.group_size)};
  }

  const MlpTensors& tensors_;
  Projection projection_;
  const LinearFormat& format_;
  const WordLayout& words_;
  IntegerLinear out_;
};

}  // namespace

Result<IntegerLinear> read_integer_linear(const MlpTensors& tensors, Projection projection,
                                          const LinearFormat& format, std::int64_t rows,
                                          std::int64_t columns) {
  return IntegerReader(tensors, projection, format, rows, columns).run();
}

}  // namespace moesaic::checkpoint
