#include "checkpoint/pushing.h"

#include <fmt/format.h>

#include <cstring>
#include <filesystem>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "checkpoint/container_support.h"
#include "checkpoint/reader/side_files.h"
#include "experts/expert_fields.h"

namespace moesaic::test {
namespace {

bool is_folder(const std::string& path) { return std::filesystem::is_directory(path); }

std::string field_difference(std::string_view field, const ConstTensorView& got,
                             const ConstTensorView& want) {
  if (got.present() != want.present()) return fmt::format("{}: only one has it", field);
  if (!got.present()) return {};
  if (got.dtype != want.dtype || !(got.shape == want.shape)) {
    return fmt::format("{}: got {} {}, want {} {}", field, dtype_name(got.dtype),
                       got.shape.to_string(), dtype_name(want.dtype), want.shape.to_string());
  }
  const auto bytes = static_cast<std::size_t>(contiguous_bytes(got.dtype, got.shape).value());
  for (std::size_t i = 0; i < bytes; ++i) {
    if (got.data[i] != want.data[i]) return fmt::format("{}: byte {} differs", field, i);
  }
  return {};
}

}  // namespace

std::vector<StoredTensor> read_all_tensors(const std::string& path) {
  const auto set = is_folder(path) ? checkpoint::ShardSet::open(path, FileAccess::kMmap)
                                   : checkpoint::ShardSet::open_gguf(path, FileAccess::kMmap);
  if (!set.ok()) throw std::runtime_error(set.status().to_string());
  std::vector<StoredTensor> all;
  for (const checkpoint::ShardSet::Located& from : set->tensors()) {
    StoredTensor t;
    t.name = from.info->name;
    t.tensor = from.file->read_tensor(*from.info).value();
    t.blocks = from.info->block_type != quant::GgufType::kNone;
    t.ggml_type = static_cast<std::uint32_t>(from.info->block_type);
    all.push_back(std::move(t));
  }
  return all;
}

Result<WeightLoader> loader_for(const std::string& path, int layer,
                                const WeightLoader::Options& options) {
  if (!is_folder(path)) {
    MOESAIC_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(path));
    return WeightLoader::from_checkpoint(checkpoint, layer, options);
  }
  WeightLoader::Options with_files = options;
  for (const std::string_view name : checkpoint::kSideFiles) {
    const std::string file = fmt::format("{}/{}", path, name);
    if (!std::filesystem::exists(file)) continue;
    with_files.side_files.emplace_back(std::string(name), read_bytes(file));
  }
  return WeightLoader::from_config(read_bytes(path + "/config.json"), layer, with_files);
}

Status push(WeightLoader& loader, const std::vector<StoredTensor>& tensors, std::uint64_t seed,
            const std::function<bool(const std::string&)>& wanted, std::vector<int>* answers) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937_64 generator(seed);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[generator() % i]);
  if (answers != nullptr) answers->assign(tensors.size(), -1);
  for (const std::size_t i : order) {
    const StoredTensor& t = tensors[i];
    if (wanted && !wanted(t.name)) continue;
    // A copy that is gone at once: the loader must have its own.
    Tensor copy = Tensor::uninitialized(t.tensor.dtype(), t.tensor.shape()).value();
    if (t.tensor.bytes() > 0) {
      std::memcpy(copy.data(), t.tensor.data(), static_cast<std::size_t>(t.tensor.bytes()));
    }
    const Result<bool> kept =
        t.blocks ? loader.load(t.name, copy.view(), t.ggml_type) : loader.load(t.name, copy.view());
    if (!kept.ok()) return kept.status();
    if (answers != nullptr) (*answers)[i] = *kept ? 1 : 0;
    if (copy.bytes() > 0) std::memset(copy.data(), 0xEE, static_cast<std::size_t>(copy.bytes()));
  }
  return {};
}

std::string weights_difference(const ExpertWeightsView& got, const ExpertWeightsView& want) {
  for (const experts::ExpertField& field : experts::kExpertFields) {
    std::string text = field_difference(field.name, got.*field.view, want.*field.view);
    if (!text.empty()) return text;
  }
  return {};
}

std::string weights_difference(MoeLayerWeights& got, MoeLayerWeights& want, std::int64_t slots) {
  if (got.spec.prefix != want.spec.prefix) return "prefix " + got.spec.prefix;
  if (!(got.spec.quant.weight == want.spec.quant.weight) ||
      !(got.spec.quant.activation == want.spec.quant.activation) ||
      got.spec.quant.name != want.spec.quant.name) {
    return fmt::format("scheme {} instead of {}", got.spec.quant.name, want.spec.quant.name);
  }
  if (got.spec.activation_dtype != want.spec.activation_dtype ||
      got.spec.routing.has_correction_bias != want.spec.routing.has_correction_bias) {
    return "spec";
  }
  if (got.shared_quant.name != want.shared_quant.name) return "shared scheme";
  const MoeLayerTensors &a = got.tensors, &b = want.tensors;
  constexpr std::array kTensors = {
      std::pair("gate_weight", &MoeLayerTensors::gate_weight),
      std::pair("gate_bias", &MoeLayerTensors::gate_bias),
      std::pair("e_score_correction_bias", &MoeLayerTensors::e_score_correction_bias),
      std::pair("hash_table", &MoeLayerTensors::hash_table),
      std::pair("experts_norm_weight", &MoeLayerTensors::experts_norm_weight),
      std::pair("expert_scale", &MoeLayerTensors::expert_scale),
      std::pair("shared_gate_weight", &MoeLayerTensors::shared_gate_weight)};
  for (const auto& [name, member] : kTensors) {
    const Tensor &x = a.*member, &y = b.*member;
    std::string text = field_difference(name, x.present() ? x.view() : ConstTensorView(),
                                        y.present() ? y.view() : ConstTensorView());
    if (!text.empty()) return text;
  }
  for (std::int64_t e = 0; e < slots; ++e) {
    const auto x = got.experts->expert(e), y = want.experts->expert(e);
    if (!x.ok() || !y.ok()) {
      return fmt::format("expert {}: {} / {}", e, x.status().to_string(), y.status().to_string());
    }
    std::string text = weights_difference(*x, *y);
    if (!text.empty()) return fmt::format("expert {}: {}", e, text);
  }
  if (got.experts->expert(slots).ok()) return "an expert too many";
  if ((got.shared != nullptr) != (want.shared != nullptr)) return "shared experts";
  if (!got.shared) return {};
  const auto x = got.shared->expert(0), y = want.shared->expert(0);
  if (!x.ok() || !y.ok()) return "shared: " + x.status().to_string();
  std::string text = weights_difference(*x, *y);
  return text.empty() ? text : "shared: " + text;
}

}  // namespace moesaic::test
