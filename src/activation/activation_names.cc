#include <array>
#include <string>
#include <vector>

#include "core/enum_rows.h"
#include "core/nearest_name.h"
#include "moesaic/activation.h"

namespace moesaic {
namespace {

struct KindRow {
  ActivationKind kind;
  std::string_view name;
  bool gated;
};

// One row per kind, in the order of the enumeration.
constexpr std::array<KindRow, 10> kKinds = {{
    {ActivationKind::kSilu, "silu", true},
    {ActivationKind::kGelu, "gelu", true},
    {ActivationKind::kGeluTanh, "gelu_tanh", true},
    {ActivationKind::kSwigluOai, "swigluoai", true},
    {ActivationKind::kSwigluStep, "swiglustep", true},
    {ActivationKind::kSitu, "situ", true},
    {ActivationKind::kSiluNoMul, "silu_no_mul", false},
    {ActivationKind::kGeluNoMul, "gelu_no_mul", false},
    {ActivationKind::kGeluTanhNoMul, "gelu_tanh_no_mul", false},
    {ActivationKind::kRelu2NoMul, "relu2_no_mul", false},
}};

static_assert(rows_follow_enum(kKinds, &KindRow::kind, ActivationKind::kRelu2NoMul));

struct Alias {
  std::string_view name;
  ActivationKind kind;
};
constexpr std::array<Alias, 3> kAliases = {{
    {"gelu_pytorch_tanh", ActivationKind::kGeluTanh},
    {"swigluoai_uninterleave", ActivationKind::kSwigluOai},
    {"relu2", ActivationKind::kRelu2NoMul},
}};

}  // namespace

bool is_gated(ActivationKind kind) {
  const KindRow* row = row_of_enum(kKinds, kind);
  return row != nullptr && row->gated;
}

std::string_view activation_name(ActivationKind kind) {
  const KindRow* row = row_of_enum(kKinds, kind);
  return row == nullptr ? "unknown" : row->name;
}

Result<ActivationKind> activation_from_name(std::string_view name) {
  std::vector<std::string_view> names;
  for (const KindRow& row : kKinds) {
    if (row.name == name) return row.kind;
    names.push_back(row.name);
  }
  for (const Alias& alias : kAliases) {
    if (alias.name == name) return alias.kind;
    names.push_back(alias.name);
  }
  return Status(StatusCode::kNotFound, "activation: got \"" + std::string(name.substr(0, 64)) +
                                           "\", which is not known; nearest is \"" +
                                           std::string(nearest_name(name, names)) + "\"");
}

}  // namespace moesaic
