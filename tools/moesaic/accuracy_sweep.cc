#include "accuracy_sweep.h"

#include <fmt/format.h>

#include <cmath>

#include "numerics/element.h"

namespace moesaic::tool {
namespace {

// Any channel would do; not the first, where a kernel may begin.
constexpr std::int64_t kOutlierChannel = 37;

Result<AccuracyCase> changed(const AccuracyCase& data, const SweepInput& input) {
  AccuracyCase c;
  c.name = data.name;
  c.num_experts = data.num_experts, c.top_k = data.top_k;
  c.hidden_size = data.hidden_size, c.intermediate_size = data.intermediate_size;
  MOESAIC_ASSIGN_OR_RETURN(c.hidden_states,
                           Tensor::zeros(DType::kBF16, data.hidden_states.shape()));
  const std::int64_t count = data.hidden_states.bytes() / 2;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool outlier = i % c.hidden_size == kOutlierChannel % c.hidden_size;
    const double factor = input.scale * (outlier ? input.outlier : 1.0);
    store_from_f32(
        c.hidden_states.data(), DType::kBF16, i,
        load_as_f32(data.hidden_states.data(), DType::kBF16, i) * static_cast<float>(factor));
  }
  return c;
}

}  // namespace

std::vector<SweepInput> sweep_inputs() {
  std::vector<SweepInput> inputs;
  for (const double factor : {10.0, 30.0, 100.0}) {
    inputs.push_back({fmt::format("channel x{:g}", factor), factor, 1});
  }
  for (const double factor : {1e-4, 1e-2, 1.0, 1e2, 1e4}) {
    inputs.push_back({fmt::format("all x{:g}", factor), 1, factor});
  }
  return inputs;
}

std::vector<SweepScheme> sweep_schemes() {
  std::vector<SweepScheme> schemes;
  for (const Scheme& scheme : quant_schemes()) {
    schemes.push_back({std::string(scheme.name), scheme});
    if (scheme.name != "fp8-tensor") continue;
    OperandQuant fixed = scheme.activation;
    fixed.granularity = ScaleGranularity::kTensor;
    fixed.dynamic = false;
    schemes.push_back({"fp8-tensor, static", with_activation(scheme, fixed)});
  }
  return schemes;
}

bool SweepCell::honest() const {
  // Written so that a NaN is not.
  return error <= stated ||
         (!numerics.within(activation_bound) && (error <= bound || !(bound < 1)));
}

Result<SweepCell> measure_sweep(const AccuracyCase& data, const SweepScheme& scheme,
                                const SweepInput& input, int num_threads) {
  MOESAIC_ASSIGN_OR_RETURN(const AccuracyCase rows, changed(data, input));
  MOESAIC_ASSIGN_OR_RETURN(const SchemeRun run,
                           run_scheme(data, scheme.quant, rows.hidden_states, num_threads));
  SweepCell cell;
  cell.numerics = summarize(run.numerics);
  cell.error = run.arithmetic;
  cell.stated = output_bound(scheme.quant, data.intermediate_size);
  cell.activation_bound = activation_bound(scheme.quant.activation, data.intermediate_size);
  cell.bound = computed_bound(cell.stated, cell.activation_bound, cell.numerics);
  return cell;
}

}  // namespace moesaic::tool
