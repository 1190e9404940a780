#include "cpu/team.h"

#include <atomic>

#include "core/fault.h"

namespace moesaic::cpu {
namespace {

std::atomic<int> scoped_teams{0};

}  // namespace

int team_size(double work_us, int num_threads) {
  const bool small = work_us < kTeamMinUs && scoped_teams.load(std::memory_order_relaxed) == 0;
  return small && !MOESAIC_FAULT(cpu_team_for_small_work) ? 1 : num_threads;
}

ScopedTeams::ScopedTeams() { scoped_teams.fetch_add(1); }
ScopedTeams::~ScopedTeams() { scoped_teams.fetch_sub(1); }

}  // namespace moesaic::cpu
