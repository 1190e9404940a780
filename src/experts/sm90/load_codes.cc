// 4-bit weights from their source to the device: repack_codes.h.
#include <fmt/format.h>

#include "core/checked.h"
#include "core/refusal.h"
#include "experts/sm90/codes_e2m1.h"
#include "experts/sm90/experts_impl.h"
#include "experts/sm90/repack_codes.h"

namespace moesaic::cuda {
namespace {

Status check_exponents(std::string_view field, const ConstTensorView& scale) {
  const auto* const codes = scale.as<std::uint8_t>();
  const std::int64_t columns = scale.dim(1);
  for (std::int64_t i = 0; i < scale.dim(0) * columns; ++i) {
    if (codes[i] > kLargestE2m1Scale) {
      return unsupported(fmt::format("{}: got 2^{} at [{}, {}], need at most 2^{} on a GPU", field,
                                     codes[i] - 127, i / columns, i % columns,
                                     kLargestE2m1Scale - 127));
    }
  }
  return {};
}

Status repack_matrix_codes(const WeightShape& shape, std::string_view field,
                           const ConstTensorView& weight, const ConstTensorView& scale,
                           Allocation& staging, std::byte* image) {
  MOESAIC_RETURN_IF_ERROR(check_exponents(field, scale));
  const std::int64_t bytes = shape.rows * shape.columns / 2;
  const std::int64_t scale_at = round_up(bytes, 256), scale_bytes = shape.rows * shape.columns / 32;
  if (staging.bytes() < scale_at + scale_bytes) {
    MOESAIC_RETURN_IF_ERROR(staging.reserve("staging", scale_at + scale_bytes));
  }
  auto* const at = staging.as<std::byte>();
  MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of weights", at, weight.data, bytes));
  MOESAIC_RETURN_IF_ERROR(
      copy_to_device("upload of scales", at + scale_at, scale.data, scale_bytes));
  MOESAIC_RETURN_IF_ERROR(check_call(
      "repack", repack_e2m1(shape, reinterpret_cast<const std::uint8_t*>(at),
                            reinterpret_cast<const std::uint8_t*>(at + scale_at), image, nullptr)));
  // The staging memory is used again by the next matrix.
  return synchronize(nullptr);
}

}  // namespace

Status repack_mxfp4(const RepackCall& call) {
  const ExpertWeightsView& v = call.weights;
  MOESAIC_RETURN_IF_ERROR(repack_matrix_codes(call.plan.w13, "w13_scale", v.w13, v.w13_scale,
                                              call.staging, call.parts[0]));
  return repack_matrix_codes(call.plan.w2, "w2_scale", v.w2, v.w2_scale, call.staging,
                             call.parts[1]);
}

}  // namespace moesaic::cuda
