// Weights that are decoded in registers, from their source to the device: repack_codes.h.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "core/checked.h"
#include "core/refusal.h"
#include "experts/reference/matrix.h"
#include "experts/sm90/codes_nvfp4.h"
#include "experts/sm90/experts_impl.h"
#include "experts/sm90/repack_codes.h"
#include "experts/sm90/shifted_exponents.h"
#include "numerics/float_codec.h"

namespace moesaic::cuda {
namespace {

using experts::ProjectionView;

// One projection's places in kImagesAndRowScales (format_rows.h).
struct CodesTo {
  const WeightShape& shape;
  std::string_view scale_name;
  Allocation& staging;
  std::byte *image, *factors, *input_scale;
};

// Codes and the scales that go into the image, by way of the staging memory:
// repack(shape, codes, scales, image, stream) on the device.
template <class Repack>
Status repack_by(const Repack& repack, const CodesTo& to, const ConstTensorView& weight,
                 const std::uint8_t* scale, std::int64_t scale_bytes) {
  const std::int64_t bytes = to.shape.rows * to.shape.columns * dtype_bits(weight.dtype) / 8;
  const std::int64_t scale_at = round_up(bytes, 256);
  if (to.staging.bytes() < scale_at + scale_bytes) {
    MOESAIC_RETURN_IF_ERROR(to.staging.reserve("staging", scale_at + scale_bytes));
  }
  auto* const at = to.staging.as<std::byte>();
  MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of weights", at, weight.data, bytes));
  MOESAIC_RETURN_IF_ERROR(copy_to_device("upload of scales", at + scale_at, scale, scale_bytes));
  MOESAIC_RETURN_IF_ERROR(check_call(
      "repack", repack(to.shape, reinterpret_cast<const std::uint8_t*>(at),
                       reinterpret_cast<const std::uint8_t*>(at + scale_at), to.image, nullptr)));
  // The staging memory is used again by the next matrix.
  return synchronize(nullptr);
}

Status put_factors(const CodesTo& to, const std::vector<float>& factors, float input_scale) {
  MOESAIC_RETURN_IF_ERROR(
      copy_to_device("upload of scales", to.factors, factors.data(), to.shape.rows * 4));
  return copy_to_device("upload of scales", to.input_scale, &input_scale, 4);
}

// The image of int4-fp8 has no place for the sign of a scale.
Status check_signs(std::string_view field, const ConstTensorView& scale) {
  const auto* const codes = scale.as<std::uint8_t>();
  const std::int64_t groups = scale.dim(1), count = scale.dim(0) * groups;
  const auto* const negative = std::find_if(codes, codes + count, [](std::uint8_t c) {
    return c > 0x80 && c < 0xFF;  // neither -0 nor NaN
  });
  if (negative == codes + count) return {};
  return unsupported(fmt::format("{}: got {} in row {}, need none that is negative on a GPU", field,
                                 f32_from_e4m3(*negative), (negative - codes) / groups));
}

template <class Put>
Status both_projections(const RepackCall& call, const Put& put) {
  const auto to = [&](const WeightShape& shape, std::string_view name, std::size_t part) {
    return CodesTo{
        shape, name, call.staging, call.parts[part], call.parts[part + 2], call.parts[part + 4]};
  };
  MOESAIC_RETURN_IF_ERROR(put(to(call.plan.w13, "w13_scale", 0), experts::w13_of(call.weights)));
  return put(to(call.plan.w2, "w2_scale", 1), experts::w2_of(call.weights));
}

template <class Repack>
Status repack_mx(const RepackCall& call, const FactorRange& range, const Repack& repack) {
  return both_projections(call, [&](const CodesTo& to, const ProjectionView& v) {
    MOESAIC_ASSIGN_OR_RETURN(const ShiftedExponents e,
                             shift_exponents(to.scale_name, range, v.weight, v.scale));
    MOESAIC_RETURN_IF_ERROR(repack_by(repack, to, v.weight, e.fields.data(),
                                      static_cast<std::int64_t>(e.fields.size())));
    return put_factors(to, e.factors, 1.0F);
  });
}

}  // namespace

Status repack_mxfp4(const RepackCall& call) { return repack_mx(call, kE2m1Factors, &repack_e2m1); }
Status repack_mxfp8(const RepackCall& call) { return repack_mx(call, kE4m3Factors, &repack_e4m3); }

Status repack_nvfp4(const RepackCall& call) {
  return both_projections(call, [&](const CodesTo& to, const ProjectionView& v) {
    MOESAIC_RETURN_IF_ERROR(repack_by(&repack_nvfp4_codes, to, v.weight, v.scale.as<std::uint8_t>(),
                                      v.scale.dim(0) * v.scale.dim(1)));
    // In the order of the reference: row * (input * matrix).
    const float input = v.input_scale.present() ? v.input_scale.as<float>()[0] : 1.0F;
    const float whole = v.global_scale.present() ? input * v.global_scale.as<float>()[0] : input;
    std::vector<float> factors(static_cast<std::size_t>(to.shape.rows), whole * kNvfp4Unit);
    for (std::size_t n = 0; n < factors.size() && v.channel_scale.present(); ++n) {
      factors[n] = v.channel_scale.as<float>()[n] * whole * kNvfp4Unit;
    }
    return put_factors(to, factors, input);
  });
}

Status repack_int4_fp8(const RepackCall& call) {
  return both_projections(call, [&](const CodesTo& to, const ProjectionView& v) {
    MOESAIC_RETURN_IF_ERROR(check_signs(to.scale_name, v.scale));
    const std::int64_t group = to.shape.columns / v.scale.dim(1);
    const auto repack = [&](const WeightShape& shape, const std::uint8_t* weight,
                            const std::uint8_t* scale, std::byte* image, void* stream) {
      return repack_int4_fp8_codes(shape, weight, scale, group, image, stream);
    };
    MOESAIC_RETURN_IF_ERROR(repack_by(repack, to, v.weight, v.scale.as<std::uint8_t>(),
                                      v.scale.dim(0) * v.scale.dim(1)));
    const float* const rows = v.channel_scale.as<float>();
    return put_factors(to, std::vector<float>(rows, rows + to.shape.rows),
                       v.input_scale.present() ? v.input_scale.as<float>()[0] : 1.0F);
  });
}

}  // namespace moesaic::cuda
