#include <array>
#include <string>
#include <vector>

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

constexpr bool rows_are_ordered() {
  for (std::size_t i = 0; i < kKinds.size(); ++i) {
    if (static_cast<std::size_t>(kKinds[i].kind) != i) return false;
  }
  return true;
}
static_assert(rows_are_ordered(), "kKinds must follow the order of ActivationKind");

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

bool is_gated(ActivationKind kind) { return kKinds[static_cast<std::size_t>(kind)].gated; }

std::string_view activation_name(ActivationKind kind) {
  return kKinds[static_cast<std::size_t>(kind)].name;
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
