// convert_checkpoint: reads one expert at a time, writes into a temporary folder, renames it.
#include "moesaic/convert.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>

#include "checkpoint/config/config.h"
#include "checkpoint/container/gguf.h"
#include "checkpoint/container/guard.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/mapped_file.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container/safetensors_stream.h"
#include "checkpoint/convert/config.h"
#include "checkpoint/convert/folder.h"
#include "checkpoint/convert/index.h"
#include "checkpoint/convert/plan.h"
#include "checkpoint/convert/weight_errors.h"
#include "core/fault.h"
#include "core/refusal.h"
#include "cpu/tiers.h"
#include "numerics/integer.h"
#include "quant/arguments.h"
#include "quant/dequantize_weight.h"
#include "quant/nvfp4.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using checkpoint::WeightMatrix;

constexpr std::size_t kCopyBytes = 4U << 20;
constexpr std::size_t kMostFilesNamed = 8;  // of files that are left out, in one note

Status io_error(const std::string& path, std::string_view what, const std::error_code& error) {
  return {StatusCode::kIo, fmt::format("{}: cannot {}: {}", path, what, error.message())};
}

Status write_text(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  if (!out.good()) return {StatusCode::kIo, path + ": cannot write"};
  return checkpoint::flush_to_disk(path);
}

// GGUF names, blocks and metadata have no place in a folder of safetensors.
Status refuse_gguf(const std::string& from) {
  std::error_code error;
  bool gguf = false, safetensors = false;
  if (fs::is_directory(from, error)) {
    for (const fs::directory_entry& entry : fs::directory_iterator(from, error)) {
      const std::string extension = entry.path().extension().string();
      gguf = gguf || extension == ".gguf";
      safetensors = safetensors || extension == checkpoint::kSafetensorsExtension;
    }
  } else if (fs::exists(from, error)) {
    gguf = checkpoint::has_gguf_magic(from) || from.ends_with(".gguf");
  }
  gguf = gguf && !safetensors;
  if (!gguf || MOESAIC_FAULT(convert_takes_gguf)) return {};
  return {StatusCode::kUnsupported,
          fmt::format("{}: converting GGUF is not supported: its tensor names and blocks mean "
                      "nothing in a folder of safetensors, and its metadata is no config.json; "
                      "need the safetensors that it was made from",
                      checkpoint::quote_name(from))};
}

class Converter {
 public:
  Converter(const std::string& from, const ConvertOptions& options)
      : from_(from), options_(options) {}

  Result<ConvertReport> run(const std::string& to) {
    MOESAIC_ASSIGN_OR_RETURN(const checkpoint::ConvertFormat format,
                             checkpoint::convert_format_from_name(options_.scheme));
    MOESAIC_RETURN_IF_ERROR(refuse_gguf(from_));
    MOESAIC_ASSIGN_OR_RETURN(
        const checkpoint::ConvertDestination destination,
        output(checkpoint::check_destination(from_, to, options_.replace_any_folder)));
    Checkpoint::Options open_options;
    open_options.access = options_.access;
    MOESAIC_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::open(from_, open_options));
    MOESAIC_ASSIGN_OR_RETURN(const checkpoint::ShardSet shards,
                             checkpoint::ShardSet::open(from_, options_.access));
    MOESAIC_ASSIGN_OR_RETURN(
        const std::string old_config,
        checkpoint::read_text_file(from_ + "/config.json", checkpoint::kMaxConfigBytes));
    MOESAIC_ASSIGN_OR_RETURN(const checkpoint::SourceQuantization source,
                             checkpoint::read_source_quantization(from_, old_config));
    MOESAIC_ASSIGN_OR_RETURN(plan_,
                             checkpoint::plan_conversion(checkpoint, shards, source, format));
    MOESAIC_ASSIGN_OR_RETURN(const std::string config,
                             checkpoint::converted_config(old_config, plan_.quantization));
    MOESAIC_ASSIGN_OR_RETURN(const std::string index, checkpoint::converted_index(plan_.shards));
    total_bytes_ = static_cast<std::int64_t>(shards.total_bytes());

    report_.notes = plan_.notes;
    checkpoint::remove_leftovers(destination.path, &report_.notes);
    MOESAIC_ASSIGN_OR_RETURN(checkpoint::TemporaryFolder folder,
                             output(checkpoint::TemporaryFolder::create(destination)));
    report_.bytes_in = total_bytes_;
    for (const checkpoint::PlannedShard& shard : plan_.shards) {
      MOESAIC_RETURN_IF_ERROR(write_shard(checkpoint, shard, folder.file(shard.file)));
    }
    MOESAIC_RETURN_IF_ERROR(output(write_text(folder.file("config.json"), config)));
    MOESAIC_RETURN_IF_ERROR(output(write_text(folder.file("model.safetensors.index.json"), index)));
    MOESAIC_RETURN_IF_ERROR(copy_small_files(shards, folder));
    MOESAIC_ASSIGN_OR_RETURN(const std::vector<std::string> files, output(folder.files()));
    const std::string record = record_text(files);
    MOESAIC_RETURN_IF_ERROR(output(write_text(folder.file(checkpoint::kConversionRecord), record)));
    MOESAIC_RETURN_IF_ERROR(check_stop());
    MOESAIC_RETURN_IF_ERROR(output(folder.commit()));
    add_progress(total_bytes_ - done_bytes_);
    return std::move(report_);
  }

 private:
  // What failed here lies with the destination, not with the source.
  template <class T>  // Status or Result
  T output(T result) const {
    if (!result.ok() && options_.failed_on_output != nullptr) *options_.failed_on_output = true;
    return result;
  }

  Status check_stop() const {
    if (!options_.should_stop) return {};
    try {
      if (!options_.should_stop()) return {};
    } catch (...) {
      return {StatusCode::kInvalidArgument, "should_stop: threw an exception; nothing was written"};
    }
    return {StatusCode::kIo, "convert: interrupted; nothing was written"};
  }
  void add_progress(std::int64_t bytes) {
    done_bytes_ = std::min(done_bytes_ + bytes, total_bytes_);
    if (options_.progress) options_.progress(done_bytes_, total_bytes_);
  }

  // --- configuration and lists ----------------------------------------------------------------

  std::string record_text(const std::vector<std::string>& files) const {
    Json layers = Json::array();
    for (std::size_t i = 0; i < report_.layers.size(); ++i) {
      const ConvertReport::Layer& l = report_.layers[i];
      layers.push_back({{"layer", l.layer},
                        {"rel_l2_weights", errors_of_original_[i]},
                        {"bytes_in", l.bytes_in},
                        {"bytes_out", l.bytes_out}});
    }
    Json names = Json::array();
    for (const std::string& name : files) {
      names.push_back(MOESAIC_FAULT(convert_records_text) ? Json(name)
                                                          : checkpoint::recorded_name(name));
    }
    return Json({{"scheme", checkpoint::convert_format_name(plan_.format)},
                 {"layers", layers},
                 {"bytes_in", report_.bytes_in},
                 {"bytes_out", report_.bytes_out},
                 {"files", std::move(names)}})
               .dump(2, ' ', false, Json::error_handler_t::replace) +
           "\n";
  }

  // Tokeniser, generation settings, golden file: everything beside weights and configuration.
  Status copy_small_files(const checkpoint::ShardSet& shards,
                          const checkpoint::TemporaryFolder& folder) {
    std::set<std::string> shard_files;
    for (const checkpoint::ShardSet::Located& t : shards.tensors()) {
      shard_files.insert(fs::path(t.file->path()).filename().string());
    }
    std::map<std::string_view, std::set<std::string>> left_out;  // by what they are
    std::error_code error;
    for (fs::directory_iterator it(from_, error), end; !error && it != end; it.increment(error)) {
      const fs::path& path = it->path();
      const std::string name = path.filename().string();
      const std::string extension = path.extension().string();
      const bool weights = extension == ".bin" || extension == ".pt" || extension == ".pth" ||
                           extension == ".gguf" ||
                           (extension == ".safetensors" &&
                            (name.starts_with("model") || name.starts_with("consolidated")));
      const bool rewritten = name == "config.json" || name.ends_with(".index.json") ||
                             name == "hf_quant_config.json" || name == "quantize_config.json" ||
                             name == "quant_config.json" || name == "quantization_config.json" ||
                             name == checkpoint::kConversionRecord ||
                             name == checkpoint::kConversionMark;
      if (rewritten || shard_files.count(name) > 0) continue;
      if (weights) {
        left_out["other files of weights"].insert(checkpoint::quote_name(name));
        continue;
      }
      std::error_code unknown;  // of a link that leads nowhere, which is no failure of this list
      const fs::file_type type = fs::status(path, unknown).type();
      if (type != fs::file_type::regular) {
        const char* what = type == fs::file_type::directory   ? "folders"
                           : type == fs::file_type::not_found ? "links to nothing"
                                                              : "other entries";
        left_out[what].insert(checkpoint::quote_name(name));
        continue;
      }
      std::error_code failure;
      fs::copy_file(path, folder.file(name), failure);
      if (failure) return output(io_error(name, "copy", failure));
      MOESAIC_RETURN_IF_ERROR(output(checkpoint::flush_to_disk(folder.file(name))));
    }
    if (error) return io_error(from_, "list", error);
    for (const auto& [what, names] : left_out) {
      const std::size_t shown = std::min(names.size(), kMostFilesNamed);
      const auto end = std::next(names.begin(), static_cast<std::ptrdiff_t>(shown));
      report_.notes.push_back(fmt::format(
          "{} of the source are not copied: {}{}", what, fmt::join(names.begin(), end, ", "),
          shown < names.size() ? fmt::format(", {} more", names.size() - shown) : ""));
    }
    return {};
  }

  // --- tensors ----------------------------------------------------------------------------------

  Status write_shard(const Checkpoint& checkpoint, const checkpoint::PlannedShard& shard,
                     const std::string& path) {
    const std::pair<std::string, std::string> metadata[] = {{"format", "pt"}};
    MOESAIC_ASSIGN_OR_RETURN(
        checkpoint::SafetensorsStream out,
        output(checkpoint::SafetensorsStream::create(path, shard.tensors, metadata)));
    for (const checkpoint::ShardSet::Located& tensor : shard.copies) {
      MOESAIC_RETURN_IF_ERROR(copy_tensor(tensor, &out));
    }
    if (shard.layer >= 0) {
      const checkpoint::PlannedLayer& layer = plan_.layers[static_cast<std::size_t>(shard.layer)];
      MOESAIC_RETURN_IF_ERROR(convert_layer(checkpoint, layer, &out)
                                  .with_context(fmt::format("layer {}", layer.spec.layer)));
    }
    for (const checkpoint::TensorSpec& t : shard.tensors) {
      MOESAIC_ASSIGN_OR_RETURN(const std::int64_t bytes, contiguous_bytes(t.dtype, t.shape));
      report_.bytes_out += bytes;
    }
    return output(out.finish());
  }

  Status copy_tensor(const checkpoint::ShardSet::Located& tensor,
                     checkpoint::SafetensorsStream* out) {
    const checkpoint::TensorInfo& info = *tensor.info;
    buffer_.resize(kCopyBytes);
    for (std::uint64_t offset = 0; offset < info.bytes(); offset += kCopyBytes) {
      MOESAIC_RETURN_IF_ERROR(check_stop());
      const std::size_t size = std::min<std::uint64_t>(kCopyBytes, info.bytes() - offset);
      const std::span<std::byte> piece(buffer_.data(), size);
      MOESAIC_RETURN_IF_ERROR(tensor.file->read_range(info, offset, piece));
      MOESAIC_RETURN_IF_ERROR(output(out->write(info.name, offset, piece)));
      add_progress(static_cast<std::int64_t>(size));
    }
    return {};
  }

  Status convert_layer(const Checkpoint& checkpoint, const checkpoint::PlannedLayer& layer,
                       checkpoint::SafetensorsStream* out) {
    MOESAIC_ASSIGN_OR_RETURN(MoeLayerWeights weights, checkpoint.load_layer(layer.spec.layer, {}));
    const std::int64_t h = layer.spec.hidden_size;
    const std::int64_t i = layer.spec.intermediate_size;
    const std::int64_t rows13 = layer.gated ? 2 * i : i;
    for (Tensor* t : {&w13_, &decoded13_}) {
      MOESAIC_ASSIGN_OR_RETURN(*t, Tensor::uninitialized(DType::kF32, {rows13, h}));
    }
    for (Tensor* t : {&w2_, &decoded2_}) {
      MOESAIC_ASSIGN_OR_RETURN(*t, Tensor::uninitialized(DType::kF32, {h, i}));
    }
    checkpoint::WeightErrors errors(checkpoint::convert_format_name(plan_.format));
    for (std::int64_t e = 0; e < layer.spec.num_experts; ++e) {
      MOESAIC_RETURN_IF_ERROR(check_stop());
      MOESAIC_ASSIGN_OR_RETURN(const ExpertWeightsView v, weights.experts->expert(e));
      const OperandQuant& quant = weights.spec.quant.weight;
      const quant::StoredMatrix m13 = {
          v.w13,      v.w13_scale, v.w13_global_scale, v.w13_channel_scale,
          v.w13_zero, v.w13_min,   v.w13_perm};
      const quant::StoredMatrix m2 = {v.w2,      v.w2_scale, v.w2_global_scale, v.w2_channel_scale,
                                      v.w2_zero, v.w2_min,   v.w2_perm};
      MOESAIC_RETURN_IF_ERROR(quant::dequantize_weight(quant, m13, i, w13_.view()));
      MOESAIC_RETURN_IF_ERROR(quant::dequantize_weight(quant, m2, h, w2_.view()));
      MOESAIC_RETURN_IF_ERROR(
          write_expert(layer, e, out, &errors).with_context(fmt::format("expert {}", e)));
      add_progress(layer.bytes_in / layer.spec.num_experts);
    }
    MOESAIC_RETURN_IF_ERROR(errors.check());
    const double rel = errors.relative();
    MOESAIC_ASSIGN_OR_RETURN(const auto before, converted_weight_error(from_, layer.spec.layer));
    const double all =
        MOESAIC_FAULT(convert_forgets_the_last_one) ? rel : std::hypot(before.value_or(0.0), rel);
    if (all > checkpoint::kMostWeightError) {
      return {StatusCode::kUnsupported,
              fmt::format("its weights would be off by {:.2g} of their size with what earlier "
                          "conversions did ({:.2g}), need at most {}: convert the original",
                          all, *before, checkpoint::kMostWeightError)};
    }
    report_.layers.push_back({layer.spec.layer, rel, layer.bytes_in, layer.bytes_out});
    errors_of_original_.push_back(all);
    return {};
  }

  // Rows [first, first + count) of a matrix of this expert as a view.
  static TensorView rows(Tensor& t, std::int64_t first, std::int64_t count) {
    const std::int64_t cols = t.shape()[1];
    return {t.data() + first * cols * 4, DType::kF32, {count, cols}};
  }

  Status write_expert(const checkpoint::PlannedLayer& layer, std::int64_t e,
                      checkpoint::SafetensorsStream* out, checkpoint::WeightErrors* errors) {
    const std::int64_t h = layer.spec.hidden_size;
    const std::int64_t i = layer.spec.intermediate_size;
    // Engines keep one global scale for gate and up together.
    const float gscale13 =
        quant::nvfp4_quant_multiplier(quant::max_abs(w13_.as<float>(), w13_.bytes() / 4));
    const float gscale2 =
        quant::nvfp4_quant_multiplier(quant::max_abs(w2_.as<float>(), w2_.bytes() / 4));
    if (layer.own_mxfp4) {
      MOESAIC_RETURN_IF_ERROR(write_own_mxfp4(layer, e, out, errors));
    } else {
      const std::int64_t up_first = layer.gated ? i : 0;
      const auto linear = [&](WeightMatrix matrix, const std::string& pattern, float gscale,
                              const TensorView& w, const TensorView& decoded) -> Status {
        if (pattern.empty()) return {};
        const std::string module = checkpoint::module_of_expert(pattern, e);
        MOESAIC_RETURN_IF_ERROR(checkpoint::encode_linear(plan_.format, w, gscale,
                                                          options_.num_threads, &tensors_, decoded)
                                    .with_context(module));
        MOESAIC_RETURN_IF_ERROR(errors->add(matrix, module, w, decoded));
        const auto specs = checkpoint::linear_tensors(plan_.format, w.dim(0), w.dim(1));
        for (std::size_t t = 0; t < specs.size(); ++t) {
          MOESAIC_RETURN_IF_ERROR(
              output(out->write(module + std::string(specs[t].suffix), tensors_[t].view())));
        }
        return {};
      };
      const bool swapped = MOESAIC_FAULT(convert_gate_up_swapped) && layer.gated;
      MOESAIC_RETURN_IF_ERROR(linear(WeightMatrix::kW13, swapped ? layer.up : layer.gate, gscale13,
                                     rows(w13_, 0, i), rows(decoded13_, 0, i)));
      MOESAIC_RETURN_IF_ERROR(linear(WeightMatrix::kW13, swapped ? layer.gate : layer.up, gscale13,
                                     rows(w13_, up_first, i), rows(decoded13_, up_first, i)));
      MOESAIC_RETURN_IF_ERROR(
          linear(WeightMatrix::kW2, layer.down, gscale2, rows(w2_, 0, h), rows(decoded2_, 0, h)));
    }
    return {};
  }

  // gpt-oss: row 2j of gate_up is gate j, row 2j + 1 up j; all experts in one tensor.
  Status write_own_mxfp4(const checkpoint::PlannedLayer& layer, std::int64_t e,
                         checkpoint::SafetensorsStream* out, checkpoint::WeightErrors* errors) {
    const auto stacked = [&](const std::string& module, const TensorView& w,
                             const TensorView& decoded, bool interleave) -> Status {
      MOESAIC_RETURN_IF_ERROR(checkpoint::encode_linear(checkpoint::ConvertFormat::kMxfp4, w, 1.0F,
                                                        options_.num_threads, &tensors_, decoded)
                                  .with_context(fmt::format("{} of expert {}", module, e)));
      MOESAIC_RETURN_IF_ERROR(
          errors->add(interleave ? WeightMatrix::kW13 : WeightMatrix::kW2, module, w, decoded));
      for (std::size_t t = 0; t < 2; ++t) {
        const std::int64_t n = tensors_[t].shape()[0];
        const std::int64_t row_bytes = tensors_[t].bytes() / n;
        Tensor ordered;
        MOESAIC_ASSIGN_OR_RETURN(ordered, Tensor::uninitialized(DType::kU8, tensors_[t].shape()));
        for (std::int64_t r = 0; r < n; ++r) {
          const std::int64_t to = !interleave ? r : r < n / 2 ? 2 * r : 2 * (r - n / 2) + 1;
          std::memcpy(ordered.data() + to * row_bytes, tensors_[t].data() + r * row_bytes,
                      static_cast<std::size_t>(row_bytes));
        }
        MOESAIC_RETURN_IF_ERROR(
            output(out->write(module + (t == 0 ? "_blocks" : "_scales"),
                              static_cast<std::uint64_t>(e * n * row_bytes),
                              {ordered.data(), static_cast<std::size_t>(n * row_bytes)})));
      }
      return {};
    };
    const std::int64_t h = layer.spec.hidden_size;
    const std::int64_t i = layer.spec.intermediate_size;
    MOESAIC_RETURN_IF_ERROR(
        stacked(layer.gate, rows(w13_, 0, 2 * i), rows(decoded13_, 0, 2 * i), true));
    return stacked(layer.down, rows(w2_, 0, h), rows(decoded2_, 0, h), false);
  }

  const std::string& from_;
  const ConvertOptions& options_;
  checkpoint::ConvertPlan plan_;
  ConvertReport report_;
  // Of its layers against the weights that the golden file knows: of a source that is converted itself,
  // those before.
  std::vector<double> errors_of_original_;
  std::int64_t done_bytes_ = 0, total_bytes_ = 0;
  std::vector<std::byte> buffer_;
  std::vector<Tensor> tensors_;
  Tensor w13_, w2_, decoded13_, decoded2_;
};

}  // namespace

Result<ConvertReport> convert_checkpoint(const std::string& from, const std::string& to,
                                         const ConvertOptions& options) {
  if (options.failed_on_output != nullptr) *options.failed_on_output = false;
  return checkpoint::guard_allocation("convert", [&]() -> Result<ConvertReport> {
    try {
      const cpu::ScopedIeeeMode ieee;
      MOESAIC_RETURN_IF_ERROR(expect_threads(options.num_threads));
      return Converter(from, options).run(to);
    } catch (const fs::filesystem_error& error) {
      return Status(StatusCode::kIo, fmt::format("convert: {}", error.what()));
    }
  });
}

Result<std::optional<double>> converted_weight_error(const std::string& directory, int layer) {
  return checkpoint::guard_allocation("convert", [&]() -> Result<std::optional<double>> {
    const std::string path = fmt::format("{}/{}", directory, checkpoint::kConversionRecord);
    std::error_code error;
    if (!fs::exists(path, error)) return std::optional<double>();
    MOESAIC_ASSIGN_OR_RETURN(const std::string text,
                             checkpoint::read_text_file(path, checkpoint::kMaxConfigBytes));
    const auto record = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    const Status corrupt(StatusCode::kCorruptFile,
                         fmt::format("{}: need layers with layer and rel_l2_weights", path));
    if (!record.is_object() || !record.contains("layers") || !record["layers"].is_array()) {
      return corrupt;
    }
    for (const nlohmann::json& entry : record["layers"]) {
      if (!entry.is_object() || !entry.contains("layer") || !entry["layer"].is_number_integer() ||
          !entry.contains("rel_l2_weights") || !entry["rel_l2_weights"].is_number()) {
        return corrupt;
      }
      const double rel = entry["rel_l2_weights"].get<double>();
      // No format that is written here errs more; a larger number would excuse anything.
      if (!(rel >= 0.0) || rel > checkpoint::kMostWeightError) return corrupt;
      if (entry["layer"].get<std::int64_t>() == layer) return std::optional<double>(rel);
    }
    return std::optional<double>();
  });
}

}  // namespace moesaic
