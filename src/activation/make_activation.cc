#include <cmath>
#include <sstream>
#include <string>

#include "moesaic/activation.h"

namespace moesaic {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// gpt-oss fixes these in the model's code, not in its configuration.
constexpr float kOaiLimit = 7.0F;
constexpr float kOaiAlpha = 1.702F;
constexpr float kOaiBeta = 1.0F;
constexpr float kStepLimit = 7.0F;

std::string number(float value) {
  std::ostringstream text;
  text.precision(9);  // enough to tell two floats apart
  text << value;
  return text.str();
}

Status bad(std::string_view kind, std::string_view field, const std::string& got,
           const std::string& need) {
  return Status(StatusCode::kInvalidArgument, "activation " + std::string(kind) + ": " +
                                                  std::string(field) + ": got " + got + ", need " +
                                                  need);
}

// A constant that the kind does not use, or fixes: it may only be stated with that very value.
Status expect_fixed(std::string_view kind, std::string_view field, std::optional<float> stated,
                    float fixed) {
  if (!stated || *stated == fixed) return {};
  return bad(kind, field, number(*stated), number(fixed) + " (fixed) or nothing");
}

}  // namespace

Status validate(const ActivationSpec& spec) {
  const ActivationSpec defaults;
  const std::string_view name = activation_name(spec.kind);
  if (name == "unknown") {
    return Status(StatusCode::kInvalidArgument, "activation: kind: got " +
                                                    std::to_string(static_cast<int>(spec.kind)) +
                                                    ", need one of ActivationKind");
  }
  const bool oai = spec.kind == ActivationKind::kSwigluOai;
  const bool situ = spec.kind == ActivationKind::kSitu;
  const bool limited =
      oai || spec.kind == ActivationKind::kSilu || spec.kind == ActivationKind::kSwigluStep;
  if (limited) {
    if (!(spec.limit > 0.0F)) {
      return bad(name, "limit", number(spec.limit), "a number > 0, or infinity for none");
    }
  } else {
    MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "limit", spec.limit, defaults.limit));
  }
  if (oai) {
    if (!std::isfinite(spec.alpha)) return bad(name, "alpha", number(spec.alpha), "finite");
    if (!std::isfinite(spec.beta)) return bad(name, "beta", number(spec.beta), "finite");
  } else {
    MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "alpha", spec.alpha, defaults.alpha));
  }
  if (situ) {
    if (!(spec.beta > 0.0F) || !std::isfinite(spec.beta)) {
      return bad(name, "beta (B)", number(spec.beta), "a finite number > 0");
    }
    if (!std::isfinite(spec.up_limit)) {
      return bad(name, "up_limit", number(spec.up_limit), "a finite number, <= 0 for none");
    }
  } else {
    if (!oai) MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "beta", spec.beta, defaults.beta));
    MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "up_limit", spec.up_limit, defaults.up_limit));
  }
  return {};
}

Result<ActivationSpec> make_activation(std::string_view name, const ActivationParams& params) {
  ActivationSpec spec;
  MOESAIC_ASSIGN_OR_RETURN(spec.kind, activation_from_name(name));
  if (name == "swigluoai") {
    MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "limit", params.limit, kOaiLimit));
    MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "alpha", params.alpha, kOaiAlpha));
    MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "beta", params.beta, kOaiBeta));
    MOESAIC_RETURN_IF_ERROR(expect_fixed(name, "up_limit", params.up_limit, spec.up_limit));
    spec.limit = kOaiLimit;
    spec.alpha = kOaiAlpha;
    spec.beta = kOaiBeta;
    return spec;
  }
  if (spec.kind == ActivationKind::kSwigluOai && !params.limit) {
    return bad(name, "limit", "nothing", "a number > 0 (swiglu_limit)");
  }
  if (spec.kind == ActivationKind::kSitu && !params.beta) {
    return bad(name, "beta (B)", "nothing", "a number > 0");
  }
  spec.limit = params.limit.value_or(spec.kind == ActivationKind::kSwigluStep ? kStepLimit : kInf);
  spec.alpha = params.alpha.value_or(spec.alpha);
  spec.beta = params.beta.value_or(spec.beta);
  spec.up_limit = params.up_limit.value_or(spec.up_limit);
  MOESAIC_RETURN_IF_ERROR(validate(spec));
  return spec;
}

}  // namespace moesaic
