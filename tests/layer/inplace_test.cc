// FusedMoE::Options::inplace: the output over the hidden states.
#include <gtest/gtest.h>

#include <cstring>

#include "layer/layer_case.h"
#include "support/metrics.h"
#include "support/random.h"
#include "support/refusal.h"

namespace moesaic {
namespace {

using test::expect_refusal;

Tensor copy_of(const Tensor& t) {
  Tensor copy = Tensor::uninitialized(t.dtype(), t.shape()).value();
  std::memcpy(copy.data(), t.data(), static_cast<std::size_t>(t.bytes()));
  return copy;
}

// Shared experts, identity experts and several steps included, in both dtypes: the bits that go to
// another tensor.
TEST(InPlace, HasTheBitsOfAnOutputElsewhere) {
  std::vector<test::Feature> features = test::common_features();
  features.push_back({"identity experts", &test::with_identity_experts});
  for (const test::Feature& f : features) {
    const test::LayerTensors t = test::make_tensors(71, f.spec());
    FusedMoE::Options options;
    options.max_tokens = 4;
    options.num_threads = 1;
    const FusedMoE plain = test::make_layer(t, options);
    options.inplace = true;
    const FusedMoE layer = test::make_layer(t, options);
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const Tensor x = test::random_hidden(72, 11, t.spec.hidden_size, dtype);
      Tensor want = Tensor::zeros(dtype, x.shape()).value();
      ASSERT_TRUE(plain.forward(x.view(), want.view()).ok());
      Tensor both = copy_of(x);
      const Status status = layer.forward(both.view(), both.view());
      ASSERT_TRUE(status.ok()) << f.name << ": " << status.to_string();
      std::string why;
      EXPECT_TRUE(test::same_bits(both.view(), want.view(), &why)) << f.name << ": " << why;
      // The option only allows it.
      Tensor elsewhere = Tensor::zeros(dtype, x.shape()).value();
      ASSERT_TRUE(layer.forward(x.view(), elsewhere.view()).ok());
      EXPECT_TRUE(test::same_bits(elsewhere.view(), want.view(), &why)) << f.name << ": " << why;
    }
  }
}

TEST(InPlace, AnythingButTheSameTensorIsRefused) {
  const test::LayerTensors t = test::make_tensors(73, test::small_spec());
  Tensor x = test::random_hidden(74, 3, t.spec.hidden_size);
  const FusedMoE plain = test::make_layer(t);
  expect_refusal(plain.forward(x.view(), x.view()), StatusCode::kAliasing,
                 {"output", "hidden_states"});
  FusedMoE::Options options;
  options.inplace = true;
  const FusedMoE layer = test::make_layer(t, options);
  // Another dtype, one row further on, rows that are apart.
  const TensorView other(x.data(), DType::kF16, x.shape());
  expect_refusal(layer.forward(x.view(), other), StatusCode::kAliasing, {"output"});
  const std::int64_t row = t.spec.hidden_size * 2;
  const Shape two{2, t.spec.hidden_size};
  expect_refusal(layer.forward(ConstTensorView(x.data(), DType::kBF16, two),
                               TensorView(x.data() + row, DType::kBF16, two)),
                 StatusCode::kAliasing, {"output"});
  ConstTensorView apart(x.data(), DType::kBF16, two);
  apart.strides[0] = 2 * t.spec.hidden_size;
  expect_refusal(layer.forward(apart, TensorView(x.data(), DType::kBF16, two)),
                 StatusCode::kAliasing, {"output"});
}

// Without a device: a GPU keeps the routed sum where shared experts are added to it.
TEST(InPlace, OnAGpuOnlySharedExpertsNeedMoreMemory) {
  for (const bool shared : {false, true}) {
    const MoeLayerSpec spec = shared ? test::with_shared(false) : test::small_spec();
    FusedMoE::Options options;
    options.device = Device::cuda(0);
    const std::int64_t plain = explain_layer(spec, options).value().workspace_bytes;
    options.inplace = true;
    const std::int64_t inplace = explain_layer(spec, options).value().workspace_bytes;
    EXPECT_EQ(inplace > plain, shared);
    EXPECT_GE(inplace, plain);
  }
}

TEST(Summary, TellsWhatTheLayerIs) {
  const test::LayerTensors t = test::make_tensors(75, test::with_shared(false));
  FusedMoE::Options options;
  options.num_threads = 1;
  const std::string whole = test::make_layer(t, options).summary();
  for (const char* part : {"8 experts", "2 per token", "hidden 64", "intermediate 32", "silu",
                           "shared 48", "bf16 by cpu", "on cpu", "one rank"}) {
    EXPECT_NE(whole.find(part), std::string::npos) << part << " in " << whole;
  }
  options.parallel.ep_size = 3;
  options.parallel.ep_rank = 1;
  EXPECT_EQ(explain_layer(t.spec, options).status().to_string(), Status().to_string());
  MoeLayerWeights weights = t.weights();
  const std::string part = FusedMoE::create(std::move(weights), options)->summary();
  for (const char* words : {"experts 3 to 5 of 8", "rank 1 of 3 (tp 1, ep 3", "partial sums",
                            "without a communicator", "shared 48 (not here)"}) {
    EXPECT_NE(part.find(words), std::string::npos) << words << " in " << part;
  }
  options.parallel.placement = ExpertPlacement::kRoundRobin;
  const std::string robin = FusedMoE::create(t.weights(), options)->summary();
  EXPECT_NE(robin.find("experts 1, 4, 7 of 8"), std::string::npos) << robin;
}

}  // namespace
}  // namespace moesaic
