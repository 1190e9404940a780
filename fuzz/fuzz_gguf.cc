// Any bytes as a GGUF file: an error with a text, or tensors that tile the data in order; and,
// where the metadata describe a model, layers that are in range.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "checkpoint/config/gguf_config.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesaic;
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  const Result<checkpoint::GgufHeader> header =
      checkpoint::parse_gguf("f", checkpoint::GgufBytes(file));
  if (!header.ok()) {
    const StatusCode code = header.status().code();
    require(code == StatusCode::kCorruptFile || code == StatusCode::kLimitExceeded ||
            code == StatusCode::kUnsupported);
    require(header.status().message().size() < 2000);
    return 0;
  }
  std::uint64_t end = 0;
  for (const checkpoint::TensorInfo& t : header->tensors) {
    require(t.begin >= end && t.begin - end < header->alignment && t.end >= t.begin);
    end = t.end;
    require(!t.name.empty() && t.rank >= 1 && t.rank <= 4);
    require(static_cast<std::uint64_t>(contiguous_bytes(t.dtype, t.shape).value()) == t.bytes());
  }
  require(header->tensors.empty() || header->data_offset + end <= size);
  const std::array<const checkpoint::GgufHeader*, 1> parts = {&*header};
  const Result<checkpoint::ModelConfig> config = checkpoint::read_gguf_config("f", parts);
  if (!config.ok()) {
    require(!config.status().message().empty());
    require(config.status().code() != StatusCode::kInternal);
    return 0;
  }
  require(config->family != nullptr);
  int previous = -1;
  for (const MoeLayerSpec& layer : config->layers) {
    require(layer.layer > previous && layer.layer < config->num_hidden_layers);
    require(validate(layer).ok());
    previous = layer.layer;
  }
  return 0;
}
