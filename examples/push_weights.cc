// Builds a layer from weights that the program hands over tensor by tensor, as an engine with a
// weight loop of its own does: here two ranks, each of which keeps its half of the experts.
//   example_push_weights DIR [LAYER]   (a folder with config.json and model*.safetensors; layer 1)
#include <moesaic/fused_moe.h>
#include <moesaic/weight_loader.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

namespace {

using moesaic::Result;
using moesaic::Tensor;
using moesaic::WeightLoader;

// The program's own weight loop: any source of (name, tensor), in any order.
Result<moesaic::FusedMoE> load_rank(const std::string& directory, const std::string& config,
                                    int layer, const moesaic::ParallelConfig& parallel) {
  WeightLoader::Options wanted;
  wanted.parallel = parallel;
  MOESAIC_ASSIGN_OR_RETURN(WeightLoader loader, WeightLoader::from_config(config, layer, wanted));
  int kept = 0, others = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::string path = entry.path().filename().string();
    if (!path.starts_with("model") || !path.ends_with(".safetensors")) continue;
    MOESAIC_ASSIGN_OR_RETURN(const moesaic::TensorFile file,
                             moesaic::TensorFile::open(entry.path().string()));
    for (const std::string& name : file.names()) {
      MOESAIC_ASSIGN_OR_RETURN(const Tensor tensor, file.read(name));
      // False: another rank's expert, or not of this layer.
      MOESAIC_ASSIGN_OR_RETURN(const bool local, loader.load(name, tensor.view()));
      ++(local ? kept : others);
    }
  }
  std::printf("rank %d: %d tensors kept, %d are not local, %lld bytes\n", parallel.ep_rank, kept,
              others, static_cast<long long>(loader.bytes()));
  // Refuses, with their names, if tensors are missing.
  MOESAIC_ASSIGN_OR_RETURN(moesaic::MoeLayerWeights weights, loader.finish());
  moesaic::FusedMoE::Options options;
  options.parallel = parallel;
  return moesaic::FusedMoE::create(std::move(weights), options);
}

moesaic::Status run(const std::string& directory, int layer_number) {
  std::ifstream stream(directory + "/config.json");
  if (!stream) return {moesaic::StatusCode::kNotFound, directory + "/config.json: cannot be read"};
  const std::string config{std::istreambuf_iterator<char>(stream), {}};
  double sum = 0;
  Tensor total;
  for (int rank = 0; rank < 2; ++rank) {
    moesaic::ParallelConfig parallel;
    parallel.ep_size = 2;
    parallel.ep_rank = rank;
    MOESAIC_ASSIGN_OR_RETURN(const moesaic::FusedMoE layer,
                             load_rank(directory, config, layer_number, parallel));
    const moesaic::Shape shape = {3, layer.spec().hidden_size};
    MOESAIC_ASSIGN_OR_RETURN(Tensor input, Tensor::zeros(moesaic::DType::kF32, shape));
    MOESAIC_ASSIGN_OR_RETURN(Tensor output, Tensor::zeros(moesaic::DType::kF32, shape));
    if (rank == 0) {
      MOESAIC_ASSIGN_OR_RETURN(total, Tensor::zeros(moesaic::DType::kF32, shape));
    }
    const std::int64_t count = shape[0] * shape[1];
    for (std::int64_t i = 0; i < count; ++i) {
      input.as<float>()[i] = std::sin(static_cast<float>(i));
    }
    MOESAIC_RETURN_IF_ERROR(layer.forward(input.view(), output.view()));
    for (std::int64_t i = 0; i < count; ++i) total.as<float>()[i] += output.as<float>()[i];
  }
  for (std::int64_t i = 0; i < total.shape()[0] * total.shape()[1]; ++i) {
    sum += static_cast<double>(total.as<float>()[i]) * static_cast<double>(total.as<float>()[i]);
  }
  std::printf("partial sums of 2 ranks: output norm %g\n", std::sqrt(sum));
  return {};
}

// A layer of no known family: four experts whose tensors the program names itself.
moesaic::Status run_own_names() {
  moesaic::MoeLayerSpec spec;
  spec.hidden_size = 32;
  spec.intermediate_size = 64;
  spec.num_experts = spec.routing.num_experts = 4;
  spec.routing.top_k = 2;
  spec.activation_dtype = moesaic::DType::kF32;
  MOESAIC_ASSIGN_OR_RETURN(spec.activation, moesaic::make_activation("silu"));
  moesaic::ExpertNames names;
  names.block = "decoder.7.moe";
  names.gate = "expert_{e}.w1";
  names.up = "expert_{e}.w3";
  names.down = "expert_{e}.w2";
  MOESAIC_ASSIGN_OR_RETURN(WeightLoader loader, WeightLoader::from_spec(spec, names, "", {}));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor up, Tensor::zeros(moesaic::DType::kF32, {64, 32}));
  MOESAIC_ASSIGN_OR_RETURN(const Tensor down, Tensor::zeros(moesaic::DType::kF32, {32, 64}));
  for (int e = 0; e < 4; ++e) {
    const std::string expert = names.block + ".expert_" + std::to_string(e);
    const moesaic::NamedTensor tensors[] = {{expert + ".w1.weight", up.view()},
                                            {expert + ".w3.weight", up.view()},
                                            {expert + ".w2.weight", down.view()}};
    MOESAIC_RETURN_IF_ERROR(loader.load_weights(tensors).status());
  }
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::MoeLayerWeights weights, loader.finish());
  MOESAIC_ASSIGN_OR_RETURN(const moesaic::ExpertWeightsView expert, weights.experts->expert(3));
  std::printf("of no known family: w13 %s\n", expert.w13.shape.to_string().c_str());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: example_push_weights DIR [LAYER]\n");
    return 2;
  }
  moesaic::Status status = run(argv[1], argc == 3 ? std::atoi(argv[2]) : 1);
  if (status.ok()) status = run_own_names();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return status.ok() ? 0 : 1;
}
