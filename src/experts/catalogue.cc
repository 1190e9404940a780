// The ordered list of experts backends and the choice among them. A new backend is one more row.
#include <fmt/format.h>

#include <array>
#include <string>

#include "experts/problem_checks.h"
#include "experts/ref_experts.h"
#include "moesaic/experts.h"

namespace moesaic {
namespace {

// Fastest first; cpu_reference computes everything and stays last.
constexpr auto kCatalogue = std::to_array<ExpertsBackend>({
    {"cpu_reference", "plain loops, every scheme, activation and format; one thread",
     &ref_experts_can_implement, &make_ref_experts},
});

std::string all_names() {
  std::string text;
  for (const ExpertsBackend& row : kCatalogue) {
    if (!text.empty()) text += ", ";
    text += row.name;
  }
  return text;
}

}  // namespace

std::span<const ExpertsBackend> experts_catalogue() { return kCatalogue; }

std::vector<CandidateReport> explain_experts(const MoeProblem& problem) {
  std::vector<CandidateReport> reports;
  reports.reserve(kCatalogue.size());
  for (const ExpertsBackend& row : kCatalogue) {
    const Status status = row.can_implement(problem);
    reports.push_back({"experts", std::string(row.name), status.message(), status.ok()});
  }
  return reports;
}

Result<const ExpertsBackend*> choose_experts(const MoeProblem& problem, std::string_view forced) {
  // A problem that makes no sense is the caller's error, not a matter of backends.
  MOESAIC_RETURN_IF_ERROR(check_problem(problem));
  std::string reasons;
  for (const ExpertsBackend& row : kCatalogue) {
    if (!forced.empty() && row.name != forced) continue;
    const Status status = row.can_implement(problem);
    if (status.ok()) return &row;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", row.name, status.message());
  }
  if (!reasons.empty()) return Status(StatusCode::kUnsupported, "experts backend " + reasons);
  return Status(StatusCode::kNotFound, fmt::format("experts backend: got \"{}\", need one of {}",
                                                   forced.substr(0, 64), all_names()));
}

}  // namespace moesaic
