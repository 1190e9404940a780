// A whole checkpoint: 4 bytes (little-endian) with the length of config.json, that text, then the
// bytes of model.safetensors; or, when the bytes begin with "GGUF", one such file. Everything that
// opens is read to the last expert.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "moesaic/checkpoint.h"

namespace {

// A folder of this process, removed at its end.
struct Scratch {
  Scratch() : path("/tmp/moesaic-fuzz-" + std::to_string(getpid())) {
    std::filesystem::create_directories(path);
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string path;
};

void write(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void require(const moesaic::Status& status) {
  if (status.ok()) return;
  if (status.message().empty() || status.code() == moesaic::StatusCode::kInternal) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace moesaic;
  static const Scratch scratch;
  std::string_view bytes(reinterpret_cast<const char*>(data), size);
  std::string path = scratch.path;
  if (bytes.starts_with("GGUF")) {
    path += "/model.gguf";
    write(path, bytes);
  } else {
    std::uint32_t length = 0;
    if (bytes.size() < sizeof(length)) return 0;
    std::memcpy(&length, bytes.data(), sizeof(length));
    bytes.remove_prefix(sizeof(length));
    if (length > bytes.size()) return 0;
    write(path + "/config.json", bytes.substr(0, length));
    write(path + "/model.safetensors", bytes.substr(length));
  }
  const Result<Checkpoint> checkpoint = Checkpoint::open(path, {FileAccess::kCopy});
  if (!checkpoint.ok()) {
    require(checkpoint.status());
    return 0;
  }
  (void)checkpoint->problems();
  int layers = 0;
  for (const MoeLayerSpec& spec : checkpoint->layers()) {
    if (++layers > 4) break;
    for (const int tp : {1, 2}) {
      ParallelConfig parallel;
      parallel.tp_size = tp;
      parallel.tp_rank = tp - 1;
      Result<MoeLayerWeights> layer = checkpoint->load_layer(spec.layer, parallel);
      require(layer.status());
      if (!layer.ok()) break;
      if (layer->shared) require(layer->shared->expert(0).status());
      for (std::int64_t e = 0; e < spec.num_experts; ++e) {
        const Result<ExpertWeightsView> expert = layer->experts->expert(e);
        require(expert.status());
        if (!expert.ok()) break;
      }
    }
  }
  return 0;
}
