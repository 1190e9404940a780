// Uses a piece of every level through the public headers and the one target.
#include <moesaic/activation.h>
#include <moesaic/checkpoint.h>
#include <moesaic/dtype.h>
#include <moesaic/experts.h>
#include <moesaic/fused_moe.h>
#include <moesaic/gate.h>
#include <moesaic/log.h>
#include <moesaic/parallel.h>
#include <moesaic/quant.h>
#include <moesaic/router.h>
#include <moesaic/spec.h>
#include <moesaic/status.h>
#include <moesaic/tensor.h>

#include <cstdio>
#include <string>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto checkpoint = moesaic::Checkpoint::open(argv[1]);
  if (!checkpoint.ok()) {
    std::fprintf(stderr, "%s\n", checkpoint.status().to_string().c_str());
    return 1;
  }
  const int index = checkpoint->layers().front().layer;
  moesaic::FusedMoE::Options options;
  options.num_threads = 2;
  const auto layer = moesaic::FusedMoE::from_checkpoint(*checkpoint, index, options);
  if (!layer.ok()) {
    std::fprintf(stderr, "%s\n", layer.status().to_string().c_str());
    return 1;
  }
  const std::int64_t hidden = layer->spec().hidden_size;
  auto input = moesaic::Tensor::zeros(moesaic::DType::kF32, {3, hidden});
  auto output = moesaic::Tensor::zeros(moesaic::DType::kF32, {3, hidden});
  if (!input.ok() || !output.ok()) return 1;
  for (std::int64_t i = 0; i < 3 * hidden; ++i)
    input->as<float>()[i] = 0.01F * static_cast<float>(i % 97);
  const moesaic::Status status = layer->forward(input->view(), output->view());
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.to_string().c_str());
    return 1;
  }
  double sum = 0;
  for (std::int64_t i = 0; i < 3 * hidden; ++i)
    sum += output->as<float>()[i] * output->as<float>()[i];
  std::printf("layer %d, backend %s, |output|^2 = %g\n", index, layer->experts_backend().c_str(),
              sum);
  return sum > 0 ? 0 : 1;
}
