// The list of prepare/finalize objects. Formats exclude each other, so order carries no preference.
#include <array>
#include <string>

#include "moesaic/modular_kernel.h"
#include "prepare_finalize/predicates.h"

namespace moesaic {
namespace {

constexpr auto kCatalogue = std::to_array<PrepareFinalizeBackend>({
    {"local", "no transport, standard format, rows stay where they are", &local_can_implement,
     &make_local_prepare_finalize},
    {"batched_reference", "no transport, one slab of rows per local expert", &batched_can_implement,
     &make_batched_prepare_finalize},
});

}  // namespace

std::span<const PrepareFinalizeBackend> prepare_finalize_catalogue() { return kCatalogue; }

std::vector<CandidateReport> explain_prepare_finalize(const MoeProblem& problem) {
  std::vector<CandidateReport> reports;
  for (const PrepareFinalizeBackend& row : kCatalogue) {
    const Status status = row.can_implement(problem);
    reports.push_back({"prepare_finalize", std::string(row.name), status.message(), status.ok()});
  }
  return reports;
}

}  // namespace moesaic
