// The rule by which a call gets a team: a pure function of the work.
#include "cpu/team.h"

#include <gtest/gtest.h>

namespace moesaic::cpu {
namespace {

TEST(Team, SmallWorkRunsOnOneThreadAndTheRestOnAll) {
  for (const int threads : {1, 2, 64}) {
    EXPECT_EQ(team_size(0, threads), 1);
    EXPECT_EQ(team_size(0.999 * kTeamMinUs, threads), 1);
    EXPECT_EQ(team_size(kTeamMinUs, threads), threads);
    EXPECT_EQ(team_size(1e12, threads), threads);
  }
}

// A layer of 3 MB is microseconds; an expert of a large model is not.
TEST(Team, BytesAndMultiplyAddsCount) {
  EXPECT_EQ(team_size(one_thread_us(3e6, 1.5e6), 2), 1);
  EXPECT_EQ(team_size(one_thread_us(9.4e6, 4.7e6), 2), 2);
  EXPECT_EQ(team_size(one_thread_us(3e6, 24e6), 2), 2);
  EXPECT_GT(one_thread_us(8e6, 0), one_thread_us(4e6, 0));
  EXPECT_GT(one_thread_us(0, 8e6), one_thread_us(0, 4e6));
}

TEST(Team, TestsOfThreadsMayHaveThemAlways) {
  {
    const ScopedTeams teams;
    EXPECT_EQ(team_size(0, 3), 3);
  }
  EXPECT_EQ(team_size(0, 3), 1);
}

}  // namespace
}  // namespace moesaic::cpu
