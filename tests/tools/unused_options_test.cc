// Options that would change nothing are refused by their names.
#include <gtest/gtest.h>

#include <cstdlib>

#include "rank_effects.h"
#include "shapes.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

// The exit code of a verb for `words` behind "moesaic".
int run_tool(std::vector<const char*> words) {
  CLI::App root("", "moesaic");
  const std::vector<Verb> verbs = {make_bench(root), make_accuracy(root)};
  words.insert(words.begin(), "moesaic");
  root.parse(static_cast<int>(words.size()), words.data());
  for (const Verb& verb : verbs) {
    if (verb.app->parsed()) return verb.run();
  }
  return kExitInternal;
}

TEST(UnusedOptions, OfAStageOfBench) {
  for (const auto& [stage, option, value] : {std::tuple{"route", "--peers", "none"},
                                             {"gate", "--backend", "cpu_reference"},
                                             {"route", "--door", "topk"}}) {
    EXPECT_EQ(run_tool({"bench", "--shape", "4,2,32,32", "--device", "cpu", "--stage", stage,
                        option, value}),
              kExitUnsupported)
        << stage << " " << option;
  }
}

TEST(UnusedOptions, RowsOfAGoldenFileThatIsNotThere) {
  EXPECT_THROW(run_tool({"accuracy", "--tokens", "5"}), CLI::ParseError);
}

bool names(const Status& status, std::string_view what) {
  return status.code() == StatusCode::kInvalidArgument &&
         status.message().find(what) != std::string::npos;
}

TEST(UnusedOptions, OfRanks) {
  RankOptions o;
  o.ranks = 4;
  o.sp = true;
  EXPECT_TRUE(names(check_rank_options(o), "--sp: got it with --tp 1"));
  o.tp = 2;
  EXPECT_TRUE(check_rank_options(o).ok());
  o.placement = "round_robin";
  EXPECT_TRUE(check_rank_options(o).ok());
  o.ep = false;
  EXPECT_TRUE(names(check_rank_options(o), "--placement: got round_robin with --no-ep"));
}

TEST(UnusedOptions, CutsOfSharedExperts) {
  const MoeLayerSpec shared = layer_from_shape("deepseek-v3").value();
  const MoeLayerSpec none = layer_from_shape("qwen3-30b").value();
  RankOptions o;
  o.ranks = 4;
  const auto check = [&](const MoeLayerSpec& spec) {
    const auto explained = explained_options(o, {}, 1);
    return explained.ok() ? check_rank_effects(o, explained->parallel, spec) : explained.status();
  };
  EXPECT_TRUE(check(none).ok());
  o.cut_shared = true;
  EXPECT_TRUE(names(check(shared), "--cut-shared: got it where no two ranks"));
  o.tp = 2;
  EXPECT_TRUE(check(shared).ok());
  EXPECT_TRUE(names(check(none), "--cut-shared: got it for a layer without shared experts"));
  o.sp = true;
  EXPECT_TRUE(names(check(shared), "without --sp"));
  RankOptions one;
  one.ranks = 1;
  one.cut_shared = true;
  EXPECT_TRUE(check_rank_effects(one, explained_options(one, {}, 1)->parallel, none).ok());
}

// explain answers for the processes that mpirun started, and once.
TEST(UnusedOptions, ExplainKnowsTheRanksOfMpirun) {
  ::setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  ::setenv("OMPI_COMM_WORLD_RANK", "3", 1);
  RankOptions o;
  o.tp = 2;
  const auto explained = explained_options(o, {}, 1);
  EXPECT_FALSE(speaks_for_all());
  RankOptions other;
  other.ranks = 3;
  EXPECT_TRUE(names(explained_options(other, {}, 1).status(), "mpirun started 4 processes"));
  ::unsetenv("OMPI_COMM_WORLD_SIZE");
  ::unsetenv("OMPI_COMM_WORLD_RANK");
  ASSERT_TRUE(explained.ok()) << explained.status().to_string();
  EXPECT_EQ(o.ranks, 4);
  EXPECT_EQ(explained->parallel.flat_size(), 4);
  EXPECT_TRUE(speaks_for_all());
}

TEST(UnusedOptions, ExplainWaitsForNobody) {
  for (const int ranks : {1, 2}) {
    RankOptions o;
    o.ranks = ranks;
    EXPECT_TRUE(explained_options(o, {}, 1).ok());
    o.timeout_s = 5;
    EXPECT_TRUE(names(explained_options(o, {}, 1).status(), "--timeout"));
  }
}

}  // namespace
}  // namespace moesaic::tool
