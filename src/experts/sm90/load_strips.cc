// Weights with strips of scales from their source to the device: repack_strips.h.
#include <fmt/format.h>

#include <cstring>
#include <vector>

#include "core/checked.h"
#include "core/refusal.h"
#include "experts/matrix_form.h"
#include "experts/sm90/experts_impl.h"
#include "experts/sm90/repack_strips.h"
#include "experts/sm90/weight_codes.h"
#include "numerics/integer.h"

namespace moesaic::cuda {
namespace {

template <class T>
Status upload_strip(const std::vector<T>& strip, std::byte*& at, const T*& to) {
  if (strip.empty()) return {};
  const auto bytes = static_cast<std::int64_t>(strip.size() * sizeof(T));
  MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of scales", at, strip.data(), bytes));
  to = reinterpret_cast<const T*>(at);
  at += round_up(bytes, 256);
  return {};
}

Status repack_strip_matrix(const OperandQuant& weight, const CodeImage& codes,
                           const WeightShape& shape, std::string_view field,
                           const experts::ProjectionView& view, const std::int32_t* row_order,
                           Allocation& staging, std::byte* image) {
  CodeStrips strips;
  MOESAIC_RETURN_IF_ERROR(make_strips(weight, codes, field, view, shape, row_order, strips));
  // Nibbles that the image has in more bits are handed over in a byte each.
  const bool widens = dtype_bits(view.weight.dtype) == 4 && image_bits(weight) != 4;
  const std::int64_t row_bytes = shape.columns * dtype_bits(view.weight.dtype) / 8;
  const std::int64_t bytes = shape.rows * row_bytes * (widens ? 2 : 1);
  const std::int64_t count = shape.rows * shape.chunks() * codes.units;
  const std::int64_t all =
      round_up(bytes, 256) + 3 * round_up(2 * count, 256) + round_up(count, 256);
  if (staging.bytes() < all) MOESAIC_RETURN_IF_ERROR(staging.reserve("staging", all));
  auto* at = staging.as<std::byte>();
  CodeSource source;
  source.places = has_fp8_codes(weight)     ? CodePlaces::kE4m3
                  : has_table_codes(weight) ? CodePlaces::kTable
                  : has_int6_codes(weight)  ? CodePlaces::kInt6
                  : has_int4_codes(weight)  ? CodePlaces::kInt4
                                            : CodePlaces::kBytes;
  source.flip = static_cast<std::uint32_t>(code_of_zero(weight));
  source.mask = (1U << image_bits(weight)) - 1;
  source.lower_bytes = !has_rests(weight);
  source.weight = reinterpret_cast<const std::uint8_t*>(at);
  const std::byte* from = view.weight.data;
  std::vector<std::byte> ordered;
  if (row_order != nullptr) {
    const std::int64_t part_rows = shape.rows / view.parts;
    ordered.resize(static_cast<std::size_t>(shape.rows * row_bytes));
    for (std::int64_t n = 0; n < shape.rows; ++n) {
      std::memcpy(ordered.data() + n * row_bytes,
                  from + stored_row(row_order, part_rows, n) * row_bytes,
                  static_cast<std::size_t>(row_bytes));
    }
    from = ordered.data();
  }
  std::vector<std::byte> widened;
  if (widens) {
    widened.resize(static_cast<std::size_t>(bytes));
    const auto* const nibbles = reinterpret_cast<const std::uint8_t*>(from);
    for (std::int64_t i = 0; i < bytes; ++i) {
      widened[static_cast<std::size_t>(i)] = std::byte{nibble_at(nibbles, i)};
    }
    from = widened.data();
  }
  MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of weights", at, from, bytes));
  at += round_up(bytes, 256);
  MOESAIC_RETURN_IF_ERROR(upload_strip(strips.upper, at, source.upper));
  MOESAIC_RETURN_IF_ERROR(upload_strip(strips.lower, at, source.lower));
  MOESAIC_RETURN_IF_ERROR(upload_strip(strips.codes, at, source.codes));
  MOESAIC_RETURN_IF_ERROR(upload_strip(strips.super, at, source.super));
  MOESAIC_RETURN_IF_ERROR(upload_strip(strips.zero, at, source.zero));
  MOESAIC_RETURN_IF_ERROR(upload_strip(strips.offset, at, source.offset));
  MOESAIC_RETURN_IF_ERROR(
      check_call("repack", repack_with_strips(shape, codes, source, image, nullptr)));
  // The staging memory is used again by the next matrix.
  return synchronize(nullptr);
}

}  // namespace

Status repack_code_strips(const RepackCall& call) {
  const ExpertsPlan& plan = call.plan;
  experts::ProjectionView w13 = experts::w13_of(call.weights);
  w13.parts = plan.w13.gated ? 2 : 1;
  // Rows of w13 in the order of w2's columns: the intermediate needs no other.
  const ConstTensorView& order = call.weights.w2_perm;
  experts::FormedMatrix formed;
  MOESAIC_ASSIGN_OR_RETURN(w13,
                           formed.narrow(plan.weight, plan.forms.w13, call.expert, "w13", w13));
  MOESAIC_RETURN_IF_ERROR(repack_strip_matrix(plan.forms.w13, plan.codes, plan.w13, "w13", w13,
                                              order.present() ? order.as<std::int32_t>() : nullptr,
                                              call.staging, call.parts[0]));
  MOESAIC_ASSIGN_OR_RETURN(
      const experts::ProjectionView w2,
      formed.narrow(plan.weight, plan.forms.w2, call.expert, "w2", experts::w2_of(call.weights)));
  MOESAIC_RETURN_IF_ERROR(repack_strip_matrix(plan.forms.w2, plan.codes2, plan.w2, "w2", w2,
                                              nullptr, call.staging, call.parts[1]));
  if (!plan.weight.act_order) return {};
  return copy_to_device("upload of an order", call.parts[2], call.weights.w13_perm.data,
                        plan.w13.columns * 4);
}

}  // namespace moesaic::cuda
