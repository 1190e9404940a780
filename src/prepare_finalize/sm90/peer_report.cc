#include "prepare_finalize/sm90/peer_report.h"

#include <fmt/format.h>

#include <atomic>
#include <string>

namespace moesaic::cuda {
namespace {

using parallel::PeerFailure;
using parallel::PeerKind;
using parallel::PeerReport;
using parallel::PeerVerdict;

const char* phase_of(std::uint32_t kind) {
  return kind < static_cast<std::uint32_t>(PeerKind::kAnswers) ? "dispatch" : "combine";
}

const char* wrong_with(std::uint32_t verdict) {
  switch (static_cast<PeerVerdict>(verdict)) {
    case PeerVerdict::kOtherCall:
      return "in another call";
    case PeerVerdict::kTooManyRows:
      return "sending more rows than there is room for";
    case PeerVerdict::kStale:
      return "at an earlier call than before";
    case PeerVerdict::kFuture:
      return "a call ahead";
    case PeerVerdict::kNotYet:
    case PeerVerdict::kReady:
      break;
  }
  return "at fault";
}

}  // namespace

Status peer_report_status(const PeerReport* report, std::string_view transport, int timeout_ms) {
  PeerReport r = *report;
  r.code = std::atomic_ref<const std::uint64_t>(report->code).load(std::memory_order_acquire);
  if (r.code == 0) return {};
  r = *report;
  std::string ranks;
  for (int i = 0; i < parallel::kPeerReportRanks; ++i) {
    if ((r.missing >> i & 1) != 0) ranks += fmt::format(" {}", i);
  }
  const std::string where = fmt::format("{} ({}), call {}", phase_of(r.kind), transport, r.epoch);
  switch (static_cast<PeerFailure>(r.code)) {
    case PeerFailure::kLate:
      return {StatusCode::kDevice,
              fmt::format("{}: nothing within {} ms from rank(s){}, says rank {}", where,
                          timeout_ms, ranks, r.reporter)};
    case PeerFailure::kBadWord:
      return {StatusCode::kDevice, fmt::format("{}: rank(s){} {}, says rank {}", where, ranks,
                                               wrong_with(r.verdict), r.reporter)};
    case PeerFailure::kRefused:
      return {
          StatusCode::kDevice,
          fmt::format("peer windows ({}), call {}: rank {} did not take part, its own error says "
                      "why",
                      transport, r.epoch, r.reporter)};
    case PeerFailure::kTooManyPairs:
      return {StatusCode::kLimitExceeded,
              fmt::format("pair_capacity: rank {} got {} pairs of a row and an expert in call {} "
                          "({}), need at most {}",
                          r.reporter, r.pairs, r.epoch, transport, r.capacity)};
    case PeerFailure::kNone:
      break;
  }
  return {StatusCode::kDevice, fmt::format("{}: report {} of rank {}", where, r.code, r.reporter)};
}

}  // namespace moesaic::cuda
