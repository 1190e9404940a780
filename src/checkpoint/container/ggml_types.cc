#include "checkpoint/container/ggml_types.h"

#include <array>
#include <utility>

namespace moesaic::checkpoint {
namespace {

// What writers have used beside the types that are decoded, so that files that hold one beside the
// experts can be walked and a refusal can give the name. Removed numbers (4, 5, 31 to 33, 36 to 38)
// are left out.
constexpr int kSuper = quant::kGgufSuperBlock;
constexpr auto kNotDecoded = std::to_array<GgmlTypeInfo>({
    {9, "Q8_1", quant::kGgufBlock, 36},
    {15, "Q8_K", kSuper, 292},
    {16, "IQ2_XXS", kSuper, 66},
    {17, "IQ2_XS", kSuper, 74},
    {18, "IQ3_XXS", kSuper, 98},
    {19, "IQ1_S", kSuper, 50},
    {21, "IQ3_S", kSuper, 110},
    {22, "IQ2_S", kSuper, 82},
    {24, "I8", 1, 1},
    {25, "I16", 1, 2},
    {26, "I32", 1, 4},
    {27, "I64", 1, 8},
    {28, "F64", 1, 8},
    {29, "IQ1_M", kSuper, 56},
    {41, "Q1_0", 128, 18},
});

}  // namespace

std::optional<GgmlTypeInfo> find_ggml_type(std::uint32_t id) {
  if (const quant::GgufTypeInfo* decoded = quant::gguf_type_info(id)) {
    return GgmlTypeInfo{id, decoded->name, decoded->block_elems, decoded->block_bytes};
  }
  for (const GgmlTypeInfo& type : kNotDecoded) {
    if (type.id == id) return type;
  }
  return std::nullopt;
}

std::optional<DType> plain_ggml_type(std::uint32_t id) {
  constexpr auto kPlain = std::to_array<std::pair<std::uint32_t, DType>>({
      {0, DType::kF32},
      {1, DType::kF16},
      {30, DType::kBF16},
      {24, DType::kI8},
      {25, DType::kI16},
      {26, DType::kI32},
      {27, DType::kI64},
      {28, DType::kF64},
  });
  for (const auto& [known, dtype] : kPlain) {
    if (known == id) return dtype;
  }
  return std::nullopt;
}

bool has_code_grid(quant::GgufType type) {
  const std::string_view name = ggml_type_info(type).name;
  return name.starts_with("IQ") && !name.starts_with("IQ4");
}

GgmlTypeInfo ggml_type_info(quant::GgufType type) {
  const auto id = static_cast<std::uint32_t>(type);
  return find_ggml_type(id).value_or(GgmlTypeInfo{0, "F32", 1, 4});
}

}  // namespace moesaic::checkpoint
