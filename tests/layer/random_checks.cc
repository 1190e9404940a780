#include "layer/random_checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "moesaic/device_tensor.h"
#include "moesaic/numerics.h"
#include "support/expect_bits.h"
#include "support/metrics.h"
#include "support/random_cases.h"

namespace moesaic::test {
namespace {

Tensor tensor_of(DType dtype, const Shape& shape) { return Tensor::zeros(dtype, shape).value(); }

std::int64_t row_bytes(const Tensor& t) { return t.bytes() / t.shape()[0]; }

Tensor rows_of(const Tensor& t, const std::vector<std::int64_t>& rows) {
  Shape shape = t.shape();
  const auto count = static_cast<std::int64_t>(rows.size());
  Tensor out = tensor_of(t.dtype(), shape.rank() == 1 ? Shape{count} : Shape{count, shape[1]});
  const std::int64_t bytes = row_bytes(t);
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(out.data() + i * bytes, t.data() + rows[static_cast<std::size_t>(i)] * bytes,
                static_cast<std::size_t>(bytes));
  }
  return out;
}

// Runs what must not be refused; nothing where it is.
std::vector<LayerRun> ran(const FusedMoE& layer, const FusedMoE::Args& args, DType output,
                          const char* what) {
  std::vector<LayerRun> run;
  auto result = run_args(layer, args, output);
  EXPECT_TRUE(result.ok()) << what << ": " << result.status().to_string();
  if (result.ok()) run.push_back(std::move(result).value());
  return run;
}

void expect_output(const RandomCall& c, const FusedMoE& layer, const FusedMoE::Args& args,
                   const Tensor& want, const char* what) {
  for (const LayerRun& run : ran(layer, args, c.drawn.output, what))
    expect_same(run.output, want, what);
}

// What few numbers do scatters: docs/accuracy.md.
constexpr std::int64_t kFewNumbers = 64;
std::int64_t numbers_of(const RandomCall& c) {
  return c.drawn.tokens * c.drawn.spec.routing.top_k * c.drawn.spec.intermediate_size;
}

double rounding_of(DType dtype) {
  return dtype == DType::kF32 ? 0.0 : dtype == DType::kBF16 ? 2.3e-3 : 3e-4;
}

// The relative error that is in force for a call whose exact result is `want`: the layer's bound of
// its parts, which may cancel, and the output's rounding.
double bound_in_force(const RandomCall& c, const std::vector<double>& want) {
  std::vector<RowNumerics> rows(static_cast<std::size_t>(c.drawn.tokens));
  FusedMoE::Args args = c.rows.args();
  args.trace.numerics = rows;
  if (ran(c.layer, args, c.drawn.output, "with numerics").empty()) return 0;
  const NumericsSummary sum = summarize(rows);
  double size = 0;
  for (const double v : want) size += v * v;
  const double parts = std::max(1.0, std::sqrt(sum.size / size));
  return parts * computed_bound(c.layer.quant().output_bound, c.layer.activation_bound(), sum);
}

bool zeros(const std::byte* data, std::int64_t bytes) {
  return std::all_of(data, data + bytes,
                     [](std::byte b) { return b == std::byte{0} || b == std::byte{0x80}; });
}

}  // namespace

FusedMoE::Args RandomRows::args() const {
  FusedMoE::Args args;
  args.hidden_states = hidden_states.view();
  if (tokens.present()) args.input_ids = tokens.view();
  return args;
}

RandomRows RandomRows::take(const std::vector<std::int64_t>& rows) const {
  RandomRows some;
  some.hidden_states = rows_of(hidden_states, rows);
  if (tokens.present()) some.tokens = rows_of(tokens, rows);
  return some;
}

void expect_within_bound(const RandomCall& c) {
  const RoutingSpec& routing = c.drawn.spec.routing;
  // Neither identity experts nor norms are in the oracle, and weights that are quantised on loading
  // have a bound of their own.
  if (routing.num_zero_experts > 0 || c.drawn.spec.input_norm_eps > 0) return;
  if (c.drawn.options.quant != "as-is") return;
  const std::vector<double> want =
      layer_oracle(c.tensors, c.rows.hidden_states, c.run,
                   routing.scale_on_output ? routing.routed_scaling_factor : 1.0);
  const Comparison found = compare(to_doubles(c.run.output.view()), want);
  const double rounding = rounding_of(c.drawn.output);
  if (found.rel_l2 <= std::hypot(c.layer.quant().output_bound, rounding)) return;
  if (numbers_of(c) < kFewNumbers) return;
  const double scatter = numbers_of(c) < 512 ? 1.5 : 1.0;
  EXPECT_LE(found.rel_l2, std::hypot(scatter * bound_in_force(c, want), rounding))
      << "float64: " << found.describe << ", stated " << c.layer.quant().output_bound;
}

void expect_rows_by_themselves(const RandomCall& c, Rng& rng) {
  const Tensor& x = c.rows.hidden_states;
  const std::int64_t tokens = c.drawn.tokens, hidden = c.drawn.spec.hidden_size;
  expect_output(c, c.layer, c.rows.args(), c.run.output, "again");

  std::vector<std::int64_t> order(static_cast<std::size_t>(tokens));
  std::iota(order.begin(), order.end(), 0);
  for (std::int64_t i = tokens - 1; i > 0; --i)
    std::swap(order[static_cast<std::size_t>(i)],
              order[static_cast<std::size_t>(rng.integer(0, i))]);
  for (const std::int64_t count :
       {tokens, std::int64_t{1}, rng.integer(1, std::min<std::int64_t>(tokens, 9))}) {
    const std::vector<std::int64_t> some(order.begin(), order.begin() + count);
    const RandomRows rows = c.rows.take(some);
    expect_output(c, c.layer, rows.args(), rows_of(c.run.output, some),
                  "some rows in another order");
  }

  const std::int64_t pitch = hidden + 16 * rng.integer(1, 3), element = row_bytes(x) / hidden;
  Tensor wide = tensor_of(x.dtype(), {tokens, pitch});
  poison(wide.view());
  for (std::int64_t i = 0; i < tokens; ++i) {
    std::memcpy(wide.data() + i * pitch * element, x.data() + i * row_bytes(x),
                static_cast<std::size_t>(row_bytes(x)));
  }
  FusedMoE::Args apart = c.rows.args();
  apart.hidden_states.data = wide.data();
  apart.hidden_states.strides[0] = pitch;
  expect_output(c, c.layer, apart, c.run.output, "rows that lie apart");

  FusedMoE::Options options = c.drawn.options;
  options.max_tokens = rng.integer(1, 40);
  options.num_threads = 3 - options.num_threads;
  auto other = FusedMoE::create(c.tensors.weights(), options);
  EXPECT_TRUE(other.ok()) << other.status().to_string();
  if (other.ok())
    expect_output(c, other.value(), c.rows.args(), c.run.output, "other chunks and threads");
}

void expect_unmoved_by_neighbours(const RandomCall& c, Rng& rng) {
  RandomRows rows = c.rows.take([&] {
    std::vector<std::int64_t> all(static_cast<std::size_t>(c.drawn.tokens));
    std::iota(all.begin(), all.end(), 0);
    return all;
  }());
  std::vector<bool> changed;
  Tensor& x = rows.hidden_states;
  for (std::int64_t i = 0; i < c.drawn.tokens; ++i) {
    changed.push_back(chance(rng, 0.3));
    if (!changed.back()) continue;
    std::byte* row = x.data() + i * row_bytes(x);
    const int kind = static_cast<int>(rng.integer(0, 2));
    if (kind == 0) std::memset(row, 0, static_cast<std::size_t>(row_bytes(x)));
    if (kind == 1) std::memset(row, 0xFF, static_cast<std::size_t>(row_bytes(x)));  // NaN
    if (kind == 2)
      std::memset(row, 0x7A, static_cast<std::size_t>(row_bytes(x)));  // huge, all equal
  }
  for (const LayerRun& run : ran(c.layer, rows.args(), c.drawn.output, "beside other rows")) {
    const std::int64_t bytes = row_bytes(run.output);
    for (std::int64_t i = 0; i < c.drawn.tokens; ++i) {
      if (changed[static_cast<std::size_t>(i)]) continue;
      EXPECT_EQ(std::memcmp(run.output.data() + i * bytes, c.run.output.data() + i * bytes,
                            static_cast<std::size_t>(bytes)),
                0)
          << "row " << i << " beside rows of zeros, NaN and huge numbers";
    }
  }
}

void expect_same_through_doors(const RandomCall& c, Rng& rng) {
  FusedMoE::Args logits = c.rows.args();
  logits.router_logits = c.run.logits.view();
  expect_output(c, c.layer, logits, c.run.output, "given logits");
  if (c.drawn.spec.routing.num_zero_experts > 0) return;  // ids as reported do not carry them
  FusedMoE::Args ids = c.rows.args();
  ids.topk_weights = c.run.topk_weights.view();
  ids.topk_ids = c.run.topk_ids.view();
  expect_output(c, c.layer, ids, c.run.output, "given ids");
  const std::int64_t tokens = c.drawn.tokens, k = c.drawn.spec.routing.top_k;
  Tensor wide = tensor_of(DType::kI64, {tokens, k});
  for (std::int64_t i = 0; i < tokens * k; ++i)
    wide.as<std::int64_t>()[i] = c.run.topk_ids.as<std::int32_t>()[i];
  ids.topk_ids = wide.view();
  expect_output(c, c.layer, ids, c.run.output, "given ids of 64 bits");

  // A slot without an expert counts as one of weight 0, unless weights multiply what experts see.
  if (c.drawn.spec.apply_router_weight_on_input) return;
  Tensor none = tensor_of(DType::kI32, {tokens, k}), weights = tensor_of(DType::kF32, {tokens, k}),
         without = tensor_of(DType::kF32, {tokens, k});
  for (std::int64_t i = 0; i < tokens * k; ++i) {
    const bool left_out = chance(rng, 0.3);
    const float weight = c.run.topk_weights.as<float>()[i];
    none.as<std::int32_t>()[i] = left_out ? -1 : c.run.topk_ids.as<std::int32_t>()[i];
    weights.as<float>()[i] = left_out ? std::numeric_limits<float>::quiet_NaN() : weight;
    without.as<float>()[i] = left_out ? 0.0F : weight;
  }
  FusedMoE::Args slots = ids, zero = ids;
  slots.topk_ids = none.view();
  slots.topk_weights = weights.view();
  zero.topk_weights = without.view();
  for (const LayerRun& run : ran(c.layer, slots, DType::kF32, "slots without experts")) {
    for (const LayerRun& want : ran(c.layer, zero, DType::kF32, "slots of weight 0")) {
      const std::vector<double> got = to_doubles(run.output.view());
      EXPECT_EQ(got, to_doubles(want.output.view())) << "slots without experts";
    }
  }
}

void expect_padding_left_out(const RandomCall& c, Rng& rng) {
  Tensor mask = tensor_of(DType::kU8, {c.drawn.tokens});
  for (std::int64_t i = 0; i < c.drawn.tokens; ++i) mask.as<std::uint8_t>()[i] = chance(rng, 0.3);
  FusedMoE::Args args = c.rows.args();
  args.padding_mask = mask.view();
  for (const LayerRun& run : ran(c.layer, args, c.drawn.output, "padding")) {
    const std::int64_t bytes = row_bytes(run.output);
    for (std::int64_t i = 0; i < c.drawn.tokens; ++i) {
      const std::byte* got = run.output.data() + i * bytes;
      if (mask.as<std::uint8_t>()[i] != 0) {
        EXPECT_TRUE(zeros(got, bytes)) << "row " << i << " is padding";
      } else {
        EXPECT_EQ(
            std::memcmp(got, c.run.output.data() + i * bytes, static_cast<std::size_t>(bytes)), 0)
            << "row " << i << " beside padding";
      }
    }
  }
}

void expect_other_outputs(const RandomCall& c) {
  const Tensor& x = c.rows.hidden_states;
  const Shape shape = x.shape();
  const MoeLayerSpec& spec = c.drawn.spec;
  if (spec.shared.intermediate_size > 0 && spec.routing.num_zero_experts == 0) {
    Tensor shared = tensor_of(DType::kF32, shape);
    poison(shared.view());
    FusedMoE::Args args = c.rows.args();
    args.shared_output = shared.view();
    for (const LayerRun& routed : ran(c.layer, args, DType::kF32, "shared experts apart")) {
      for (std::int64_t i = 0; i < shape[0] * shape[1]; ++i)
        shared.as<float>()[i] += routed.output.as<float>()[i];
      for (const LayerRun& sum : ran(c.layer, c.rows.args(), DType::kF32, "sum of parts"))
        expect_same(shared, sum.output, "routed and shared parts");
    }
  }
  if (c.drawn.options.inplace && x.dtype() == c.drawn.output) {
    Tensor both = tensor_of(x.dtype(), shape);
    std::memcpy(both.data(), x.data(), static_cast<std::size_t>(x.bytes()));
    FusedMoE::Args args = c.rows.args();
    args.hidden_states = both.view();
    args.output = both.view();
    const Status status = c.layer.forward(args);
    EXPECT_TRUE(status.ok()) << "in place: " << status.to_string();
    expect_same(both, c.run.output, "in place");
  }
}

void expect_as_on_the_cpu(const RandomCall& c) {
  FusedMoE::Options options = c.drawn.options;
  options.device = Device::cpu();
  options.backend.clear();
  options.shared_stream = false;
  auto made = FusedMoE::create(c.tensors.weights(), options);
  EXPECT_TRUE(made.ok()) << "the CPU: " << made.status().to_string();
  if (!made.ok()) return;
  FusedMoE::Args args = c.rows.args();
  args.router_logits = c.run.logits.view();
  for (const LayerRun& cpu : ran(made.value(), args, c.drawn.output, "the CPU")) {
    expect_same(c.run.topk_ids, cpu.topk_ids, "the CPU's ids");
    const std::vector<double> got = to_doubles(c.run.topk_weights.view()),
                              want = to_doubles(cpu.topk_weights.view());
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_NEAR(got[i], want[i], 1e-5 * (std::abs(want[i]) + 1e-3)) << "weight " << i;
    const Comparison both = compare(to_doubles(c.run.output.view()), to_doubles(cpu.output.view()));
    const std::vector<double> exact = to_doubles(cpu.output.view());
    EXPECT_TRUE(numbers_of(c) < kFewNumbers ||
                both.rel_l2 <= 2 * bound_in_force(c, exact) + 2 * rounding_of(c.drawn.output))
        << "the CPU's output: " << both.describe;
  }
  for (const LayerRun& cpu : ran(made.value(), c.rows.args(), c.drawn.output, "the CPU's gate")) {
    const Comparison logits =
        compare(to_doubles(c.run.logits.view()), to_doubles(cpu.logits.view()));
    EXPECT_LE(logits.rel_l2, 1e-5) << "the CPU's logits: " << logits.describe;
  }
}

void expect_same_enqueued(const RandomCall& c) {
  const Device device = c.layer.device();
  const DType output = c.drawn.output, rows = c.drawn.rows;
  if (rows != DType::kBF16 || output == DType::kF16) return;
  const DeviceTensor x = DeviceTensor::copy_of(c.rows.hidden_states.view(), device).value();
  DeviceTensor y = DeviceTensor::uninitialized(device, output, c.run.output.shape()).value();
  DeviceTensor tokens;
  FusedMoE::Args args;
  args.hidden_states = x.view();
  args.output = y.view();
  if (c.rows.tokens.present()) {
    tokens = DeviceTensor::copy_of(c.rows.tokens.view(), device).value();
    args.input_ids = std::as_const(tokens).view();
  }
  const Status status = c.layer.enqueue({}, args);
  EXPECT_TRUE(status.ok()) << "enqueue: " << status.to_string();
  if (!status.ok()) return;
  const Tensor found = [&] {
    Tensor host = tensor_of(output, c.run.output.shape());
    const Status copied = copy_tensor(std::as_const(y).view(), host.view());
    EXPECT_TRUE(copied.ok()) << copied.to_string();
    return host;
  }();
  expect_same(found, c.run.output, "enqueued");
}

}  // namespace moesaic::test
