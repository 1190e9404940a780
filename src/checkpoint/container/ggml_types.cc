#include "checkpoint/container/ggml_types.h"

#include <array>

namespace moesaic::checkpoint {
namespace {

// Every type that writers have used, so that files that hold one beside the experts can be walked
// and a refusal can give the name. Removed numbers (4, 5, 31 to 33, 36 to 38) are left out.
constexpr auto kTypes = std::to_array<GgmlTypeInfo>({
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
    {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
    {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 36},      {10, "Q2_K", 256, 84},
    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66},
    {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},
    {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},  {22, "IQ2_S", 256, 82},
    {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},
    {29, "IQ1_M", 256, 56},   {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},
    {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},    {40, "NVFP4", 64, 36},
    {41, "Q1_0", 128, 18},
});

}  // namespace

const GgmlTypeInfo* find_ggml_type(std::uint32_t id) {
  for (const GgmlTypeInfo& type : kTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

bool has_code_grid(quant::GgufType type) {
  const std::string_view name = ggml_type_info(type).name;
  return name.starts_with("IQ") && !name.starts_with("IQ4");
}

const GgmlTypeInfo& ggml_type_info(quant::GgufType type) {
  const GgmlTypeInfo* info = find_ggml_type(static_cast<std::uint32_t>(type));
  return info == nullptr ? kTypes[0] : *info;
}

}  // namespace moesaic::checkpoint
