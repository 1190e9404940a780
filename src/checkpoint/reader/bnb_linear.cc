#include "checkpoint/reader/bnb_linear.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/config/config_fields.h"
#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "core/fault.h"
#include "quant/bnb.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::size_t kMaxStateBytes = 1 << 16;  // the writer needs about 300
constexpr int kMaxStateDepth = 4;

class BnbReader {
 public:
  BnbReader(const MlpTensors& tensors, Projection projection, const LinearFormat& format,
            std::int64_t rows, std::int64_t columns)
      : tensors_(tensors),
        projection_(projection),
        format_(format),
        rows_(rows),
        columns_(columns) {}

  Result<std::vector<float>> run() {
    MOESAIC_RETURN_IF_ERROR(read_state());
    MOESAIC_RETURN_IF_ERROR(check_table());
    MOESAIC_ASSIGN_OR_RETURN(const Tensor stored, read(TensorKind::kScale));
    std::vector<float> absmax(static_cast<std::size_t>(rows_ * columns_ / format_.group_size));
    if (!format_.nested) {
      std::copy_n(stored.as<float>(), absmax.size(), absmax.begin());
    } else {
      MOESAIC_RETURN_IF_ERROR(expand(stored, &absmax));
    }
    // Quantised themselves, those of nearly empty blocks may come out below 0, and are computed with.
    const bool any_sign = format_.nested && !MOESAIC_FAULT(checkpoint_nested_absmax_is_positive);
    for (std::size_t i = 0; i < absmax.size(); ++i) {
      if ((absmax[i] >= 0 || any_sign) && std::isfinite(absmax[i])) continue;
      return corrupt(TensorKind::kScale,
                     fmt::format("got absmax {} at block {}, need a finite number{}", absmax[i], i,
                                 any_sign ? "" : " >= 0"));
    }
    return absmax;
  }

 private:
  const ShardSet::Located& stored(TensorKind kind) const {
    return *tensors_.of(kind)[static_cast<std::size_t>(projection_)];
  }
  Result<Tensor> read(TensorKind kind) const {
    return stored(kind).file->read_tensor(*stored(kind).info);
  }
  Status corrupt(TensorKind kind, std::string_view text) const {
    return {StatusCode::kCorruptFile,
            fmt::format("{}: {}", quote_name(stored(kind).info->name), text)};
  }

  // JSON text: quant_type, blocksize, shape, and for nested files the second level's constants.
  Status read_state() {
    const std::string& name = stored(TensorKind::kQuantState).info->name;
    if (stored(TensorKind::kQuantState).info->bytes() > kMaxStateBytes) {
      return {StatusCode::kLimitExceeded,
              fmt::format("{}: got {} bytes, need at most {}", quote_name(name),
                          stored(TensorKind::kQuantState).info->bytes(), kMaxStateBytes)};
    }
    MOESAIC_ASSIGN_OR_RETURN(const Tensor raw, read(TensorKind::kQuantState));
    const std::string_view text(reinterpret_cast<const char*>(raw.data()),
                                static_cast<std::size_t>(raw.bytes()));
    MOESAIC_ASSIGN_OR_RETURN(
        const nlohmann::json json,
        parse_json_document(quote_name(name), text, {kMaxStateBytes, kMaxStateDepth}));
    if (!json.is_object()) return corrupt(TensorKind::kQuantState, "need a JSON object");
    Status parsed = parse_state(ConfigFields(json, quote_name(name)));
    // What a caller may have mistyped elsewhere is a damaged tensor here.
    if (parsed.code() == StatusCode::kInvalidArgument) {
      return {StatusCode::kCorruptFile, parsed.message()};
    }
    return parsed;
  }

  Status parse_state(const ConfigFields& fields) {
    const std::string_view want = format_.table == CodeTable::kNf4 ? "nf4" : "fp4";
    MOESAIC_ASSIGN_OR_RETURN(const auto type, fields.string("quant_type"));
    if (!type || *type != want) {
      return corrupt(TensorKind::kQuantState, fmt::format("quant_type: got {}, need {}",
                                                          type ? quote_name(*type) : "none", want));
    }
    MOESAIC_ASSIGN_OR_RETURN(const auto block, fields.integer("blocksize", {1, 1 << 20}));
    if (!block || *block != format_.group_size) {
      return corrupt(TensorKind::kQuantState,
                     fmt::format("blocksize: got {}, need {}",
                                 block ? fmt::to_string(*block) : "none", format_.group_size));
    }
    MOESAIC_ASSIGN_OR_RETURN(const auto shape,
                             fields.integers("shape", {0, std::int64_t{1} << 40}, 8));
    if (!shape || *shape != std::vector<std::int64_t>{rows_, columns_}) {
      return corrupt(
          TensorKind::kQuantState,
          fmt::format("shape: got [{}], need [{}, {}]",
                      shape ? fmt::format("{}", fmt::join(*shape, ", ")) : "", rows_, columns_));
    }
    if (!format_.nested) return {};
    MOESAIC_ASSIGN_OR_RETURN(const auto nested, fields.integer("nested_blocksize", {1, 1 << 20}));
    nested_block_ = nested.value_or(quant::kBnbNestedBlockSize);
    MOESAIC_ASSIGN_OR_RETURN(const auto offset, fields.number("nested_offset"));
    if (!offset) return corrupt(TensorKind::kQuantState, "nested_offset: missing, need a number");
    offset_ = static_cast<float>(*offset);
    return {};
  }

  // The values of the codes are the type's: backends have no others.
  Status check_table() const {
    MOESAIC_ASSIGN_OR_RETURN(const Tensor table, read(TensorKind::kCodeTable));
    const auto values = quant::bnb_values(format_.table);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float got = table.as<float>()[i];
      // Writers differ in the last digits of fp4's thirds.
      if (std::abs(got - values[i]) <= 1e-6F) continue;
      return {
          StatusCode::kUnsupported,
          fmt::format("{}: got {} at [{}], need {}",
                      quote_name(stored(TensorKind::kCodeTable).info->name), got, i, values[i])};
    }
    return {};
  }

  Status expand(const Tensor& codes, std::vector<float>* absmax) const {
    const auto blocks = static_cast<std::int64_t>(absmax->size());
    const std::int64_t outer = (blocks + nested_block_ - 1) / nested_block_;
    MOESAIC_ASSIGN_OR_RETURN(const Tensor nested, read(TensorKind::kNestedScale));
    if (!(nested.shape() == Shape{outer})) {
      return {StatusCode::kInvalidShape,
              fmt::format("{}: got {}, need [{}] for {} blocks of {}",
                          quote_name(stored(TensorKind::kNestedScale).info->name),
                          nested.shape().to_string(), outer, blocks, nested_block_)};
    }
    MOESAIC_ASSIGN_OR_RETURN(const Tensor map, read(TensorKind::kNestedTable));
    const TensorView out(reinterpret_cast<std::byte*>(absmax->data()), DType::kF32, {blocks});
    return quant::expand_nested_absmax(codes.view(), map.view(), nested.view(), nested_block_,
                                       offset_, out);
  }

  const MlpTensors& tensors_;
  Projection projection_;
  const LinearFormat& format_;
  std::int64_t rows_, columns_;
  std::int64_t nested_block_ = quant::kBnbNestedBlockSize;
  float offset_ = 0;
};

}  // namespace

Result<std::vector<float>> read_bnb_absmax(const MlpTensors& tensors, Projection projection,
                                           const LinearFormat& format, std::int64_t rows,
                                           std::int64_t columns) {
  return BnbReader(tensors, projection, format, rows, columns).run();
}

}  // namespace moesaic::checkpoint
