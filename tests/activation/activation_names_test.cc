#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "moesaic/activation.h"
#include "support/refusal.h"
#include "support/special_values.h"

namespace moesaic {
namespace {

using test::kInf;

using test::expect_refusal;

TEST(ActivationNames, RoundTripAndGating) {
  for (int i = 0; i < 10; ++i) {
    const auto kind = static_cast<ActivationKind>(i);
    const auto name = activation_name(kind);
    EXPECT_EQ(activation_from_name(name).value(), kind);
    EXPECT_EQ(is_gated(kind), name.find("no_mul") == std::string_view::npos) << name;
  }
}

TEST(ActivationNames, Aliases) {
  EXPECT_EQ(activation_from_name("gelu_pytorch_tanh").value(), ActivationKind::kGeluTanh);
  EXPECT_EQ(activation_from_name("swigluoai_uninterleave").value(), ActivationKind::kSwigluOai);
  EXPECT_EQ(activation_from_name("relu2").value(), ActivationKind::kRelu2NoMul);
}

TEST(ActivationNames, UnknownNamesGetTheNearest) {
  expect_refusal(activation_from_name("sillu").status(), StatusCode::kNotFound,
                 {"activation", "\"sillu\"", "nearest is \"silu\""});
  expect_refusal(activation_from_name("SiLU").status(), StatusCode::kNotFound, {"SiLU"});
  expect_refusal(activation_from_name("").status(), StatusCode::kNotFound, {"activation"});
  expect_refusal(activation_from_name(std::string(100000, 'x')).status(), StatusCode::kNotFound,
                 {"xxx"});
  expect_refusal(make_activation("tanh").status(), StatusCode::kNotFound, {"tanh"});
}

TEST(MakeActivation, FixesWhatTheKindFixes) {
  const ActivationSpec oai = make_activation("swigluoai").value();
  EXPECT_EQ(oai, (ActivationSpec{ActivationKind::kSwigluOai, 7.0F, 1.702F, 1.0F, 0.0F}));
  ActivationParams same;
  same.limit = 7.0F;
  EXPECT_EQ(make_activation("swigluoai", same).value(), oai);
  EXPECT_EQ(make_activation("silu").value(), ActivationSpec{});
  EXPECT_EQ(make_activation("swiglustep").value().limit, 7.0F);
  EXPECT_EQ(make_activation("relu2").value().kind, ActivationKind::kRelu2NoMul);
}

TEST(MakeActivation, TakesConstantsFromTheConfiguration) {
  ActivationParams p;
  p.limit = 10.0F;
  EXPECT_EQ(make_activation("silu", p).value().limit, 10.0F);
  EXPECT_EQ(make_activation("swiglustep", p).value().limit, 10.0F);
  const ActivationSpec plain = make_activation("swigluoai_uninterleave", p).value();
  EXPECT_EQ(plain, (ActivationSpec{ActivationKind::kSwigluOai, 10.0F, 1.0F, 0.0F, 0.0F}));
  p.alpha = 1.702F;
  p.beta = 1.0F;
  EXPECT_EQ(make_activation("swigluoai_uninterleave", p).value().alpha, 1.702F);
  ActivationParams situ;
  situ.beta = 4.0F;
  EXPECT_EQ(make_activation("situ", situ).value().up_limit, 0.0F);
  situ.up_limit = 25.0F;
  EXPECT_EQ(make_activation("situ", situ).value().up_limit, 25.0F);
}

TEST(MakeActivation, RefusesWhatIsMissing) {
  expect_refusal(make_activation("swigluoai_uninterleave").status(), StatusCode::kInvalidArgument,
                 {"swigluoai_uninterleave", "limit", "got nothing"});
  expect_refusal(make_activation("situ").status(), StatusCode::kInvalidArgument,
                 {"situ", "beta", "got nothing"});
}

TEST(MakeActivation, RefusesContradictionsAndConstantsWithoutMeaning) {
  ActivationParams p;
  p.limit = 8.0F;
  expect_refusal(make_activation("swigluoai", p).status(), StatusCode::kInvalidArgument,
                 {"swigluoai", "limit", "got 8", "need 7"});
  expect_refusal(make_activation("gelu", p).status(), StatusCode::kInvalidArgument,
                 {"gelu", "limit", "got 8"});
  expect_refusal(make_activation("relu2_no_mul", p).status(), StatusCode::kInvalidArgument,
                 {"limit"});
  ActivationParams alpha;
  alpha.alpha = 1.702F;
  expect_refusal(make_activation("silu", alpha).status(), StatusCode::kInvalidArgument,
                 {"silu", "alpha", "1.70"});
  ActivationParams beta;
  beta.beta = 1.0F;
  expect_refusal(make_activation("silu", beta).status(), StatusCode::kInvalidArgument, {"beta"});
  ActivationParams up;
  up.up_limit = 1.0F;
  expect_refusal(make_activation("silu", up).status(), StatusCode::kInvalidArgument, {"up_limit"});
}

TEST(ValidateActivation, RefusesValuesOutOfRange) {
  for (const float limit : {0.0F, -7.0F, std::nanf("")}) {
    expect_refusal(validate(ActivationSpec{ActivationKind::kSilu, limit, 1, 0, 0}),
                   StatusCode::kInvalidArgument, {"silu", "limit"});
  }
  for (const float b : {0.0F, -4.0F, kInf, std::nanf("")}) {
    expect_refusal(validate(ActivationSpec{ActivationKind::kSitu, kInf, 1, b, 0}),
                   StatusCode::kInvalidArgument, {"situ", "beta (B)"});
  }
  expect_refusal(validate(ActivationSpec{ActivationKind::kSitu, kInf, 1, 4, std::nanf("")}),
                 StatusCode::kInvalidArgument, {"situ", "up_limit"});
  expect_refusal(validate(ActivationSpec{ActivationKind::kSwigluOai, 7, std::nanf(""), 1, 0}),
                 StatusCode::kInvalidArgument, {"alpha"});
  expect_refusal(validate(ActivationSpec{ActivationKind::kSwigluOai, 7, 1, kInf, 0}),
                 StatusCode::kInvalidArgument, {"beta"});
  EXPECT_TRUE(validate(ActivationSpec{}).ok());
}

TEST(ValidateActivation, RefusesWhatIsNoKind) {
  for (const int i : {10, 99, 255}) {
    ActivationSpec spec;
    spec.kind = static_cast<ActivationKind>(i);
    EXPECT_EQ(activation_name(spec.kind), "unknown");
    EXPECT_FALSE(is_gated(spec.kind));
    expect_refusal(validate(spec), StatusCode::kInvalidArgument,
                   {"kind: got ", std::to_string(i).c_str(), "ActivationKind"});
  }
}

}  // namespace
}  // namespace moesaic
