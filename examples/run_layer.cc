// Runs the first MoE layer of a checkpoint on random hidden states.
//   example_run_layer DIR
#include <moesaic/checkpoint.h>
#include <moesaic/fused_moe.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

namespace {

// Every call that can fail returns a Status (or a Result: a value or a Status). Its text names the
// field, the value found and the value needed.
moesaic::Status run(const char* directory) {
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::Checkpoint checkpoint,
                           moesaic::Checkpoint::open(directory));
  if (checkpoint.layers().empty()) {
    return {moesaic::StatusCode::kNotFound, "the checkpoint has no MoE layers"};
  }
  const int index = checkpoint.layers().front().layer;

  moesaic::FusedMoE::Options options;  // as stored, best backend, one thread per core
  options.max_tokens = 64;             // sizes the workspace; longer inputs are split
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::FusedMoE layer,
                           moesaic::FusedMoE::from_checkpoint(checkpoint, index, options));

  const std::int64_t tokens = 4;
  const std::int64_t hidden = layer.spec().hidden_size;
  const std::int64_t top_k = layer.spec().routing.top_k;
  using moesaic::DType;
  using moesaic::Tensor;
  MOESAIC_ASSIGN_OR_RETURN(Tensor input, Tensor::uninitialized(DType::kF32, {tokens, hidden}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor output, Tensor::uninitialized(DType::kF32, {tokens, hidden}));
  MOESAIC_ASSIGN_OR_RETURN(Tensor ids, Tensor::uninitialized(DType::kI32, {tokens, top_k}));
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < tokens * hidden; ++i) input.as<float>()[i] = normal(generator);

  moesaic::FusedMoE::Trace trace;  // ask for the chosen experts too
  trace.topk_ids = ids.view();
  MOESAIC_RETURN_IF_ERROR(layer.forward(input.view(), output.view(), trace));

  const std::string scheme(layer.quant().name);
  std::printf("layer %d on backend %s, arithmetic %s\n", index, layer.experts_backend().c_str(),
              scheme.c_str());
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::printf("token %d -> experts", static_cast<int>(token));
    for (std::int64_t slot = 0; slot < top_k; ++slot) {
      std::printf(" %d", ids.as<std::int32_t>()[token * top_k + slot]);
    }
    std::printf(", output[0..2] = %g %g %g\n",
                static_cast<double>(output.as<float>()[token * hidden]),
                static_cast<double>(output.as<float>()[token * hidden + 1]),
                static_cast<double>(output.as<float>()[token * hidden + 2]));
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIR (a folder with config.json and safetensors)\n", argv[0]);
    return 2;
  }
  const moesaic::Status status = run(argv[1]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
