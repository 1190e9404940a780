// Messages for a wrong command line, and what inspect prints for a layer that cannot be loaded.
#include "usage.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "rank_cli.h"
#include "support/source_folder.h"
#include "verbs.h"

namespace moesaic::tool {
namespace {

namespace fs = std::filesystem;

// The text for `words` behind "moesaic"; "" when they parse.
std::string told(std::vector<const char*> words) {
  CLI::App root("", "moesaic");
  root.require_subcommand(1);
  const std::vector<Verb> verbs = {make_inspect(root), make_run(root), make_explain(root),
                                   make_bench(root)};
  words.insert(words.begin(), "moesaic");
  const int count = static_cast<int>(words.size());
  try {
    root.parse(count, words.data());
  } catch (const CLI::ParseError& error) {
    const UsageError usage = explain_usage(root, error, count, words.data());
    EXPECT_EQ(usage.status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(usage.next.find("--help"), std::string::npos);
    return usage.status.message();
  }
  return "";
}

void expect_told(const std::vector<const char*>& words, std::vector<std::string> parts) {
  const std::string text = told(words);
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' lacks '" << part << "'";
  }
}

TEST(Usage, NumbersAreDecimal) {
  expect_told({"bench", "--shape", "x", "--tokens", "1,,4"}, {"--tokens", "'' in '1,,4'", "whole"});
  expect_told({"bench", "--shape", "x", "--seed", "-1"}, {"--seed", "'-1'", "from 0"});
  expect_told({"bench", "--shape", "x", "--seconds", "nan"}, {"--seconds", "'nan'", "a number"});
  expect_told({"bench", "--shape", ""}, {"--shape", "got ''"});
  for (const char* good : {"1", "1,4", "1048576"}) {
    EXPECT_EQ(told({"bench", "--shape", "x", "--tokens", good}), "");
  }
  for (const char* good : {"0", "18446744073709551615"}) {
    EXPECT_EQ(told({"bench", "--shape", "x", "--seed", good}), "");
  }
  for (const char* good : {"0", "0.5", "1e2", "3600"}) {
    EXPECT_EQ(told({"bench", "--shape", "x", "--seconds", good}), "");
  }
}

TEST(Usage, AMisspeltOptionIsNamedWithTheNearest) {
  expect_told({"run", "--modle", "m"}, {"'--modle'", "nearest is '--model'"});
  expect_told({"run", "--model", "m", "--layer", "1", "--input", "f", "--ouptut=o"},
              {"'--ouptut'", "nearest is '--output'"});
  expect_told({"run", "-output", "o"}, {"'-output'", "nearest is '--output'"});
  expect_told({"run", "--modle", "m"}, {"run has", "--output", "--model"});  // and the choices
  expect_told({"run", "--Repeat", "3"}, {"nearest is '--repeat'"});
  expect_told({"bench", "--shpae", "x"}, {"nearest is '--shape'"});  // in a group
  expect_told({"run", "--noep"}, {"nearest is '--no-ep'"});
  expect_told({"inspect", "m", "--frobnicate"}, {"'--frobnicate'", "inspect has", "--json"});
  expect_told({"inspect", "m", "--=x"}, {"'--'"});
  // Not misspelt: what is missing is named.
  expect_told({"run", "--model", "m"}, {"--layer", "required"});
  EXPECT_EQ(told({"explain", "--shape", "8,2,64,64", "--no-such"}).find("required"),
            std::string::npos);
}

TEST(Usage, ValuesAndWords) {
  expect_told({"explain", "--model", "m", "--layer", "x"}, {"--layer", "'x'", "a whole number"});
  expect_told({"run", "--model", "--layer", "1"}, {"--model", "no value before --layer"});
  expect_told({"bench", "--shape", "x", "--stage", "all"},
              {"--stage", "'all'", "gate, route, experts, kernel, layer", "nearest is"});
  expect_told({"inspect", "m", "n"}, {"'n'", "does not take"});
  expect_told({"--json", "inspect", "m"}, {"'--json' before the verb", "moesaic inspect --json"});
  expect_told({"--json"}, {"'--json'", "need one of", "inspect"});
  expect_told({"inspekt"}, {"'inspekt'", "nearest is 'inspect'"});
  expect_told({}, {"got none"});
  EXPECT_EQ(told({"run", "--model", "m", "--layer", "-1", "--input", "f", "--output", "-"}), "");
  EXPECT_EQ(told({"explain", "--model", "m", "--layer", "-1"}), "")
      << "the layers are listed later";
}

TEST(Usage, SchemesAreListedWithAllThatAreNear) {
  CommonOptions options;
  options.quant = "FP8";
  const Status status = check_common_options(options, /*needs_device=*/false);
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  for (const char* part :
       {"--quant: got 'FP8'", "as-is", "bf16", "nearest are fp8-block, fp8-bf16"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  options.quant = "bf61";
  EXPECT_NE(check_common_options(options, false).message().find("nearest is bf16"),
            std::string::npos);
}

TEST(Usage, RanksAsThreadsHaveALimit) {
  RankOptions options;
  options.ranks = 4096;
  std::atomic<int> bodies{0};
  const auto body = [&](const RankContext&) {
    ++bodies;
    return static_cast<int>(kExitOk);
  };
  EXPECT_EQ(run_on_ranks(options, {}, body), kExitUsage);
  EXPECT_EQ(bodies, 0);
  options.ranks = 3;
  EXPECT_EQ(run_on_ranks(options, {}, body), kExitOk);
  EXPECT_EQ(bodies, 3);
}

TEST(Usage, WhatOneRankThrowsIsToldToTheOthers) {
  RankOptions options;
  options.ranks = 3;
  options.timeout_s = 20;
  Status told;
  const auto body = [&](const RankContext& c) -> int {
    if (c.rank == 1) throw std::runtime_error("no such luck");
    const Status met = c.communicator->barrier("meet");
    if (c.rank == 0) told = met;
    return met.ok() ? kExitOk : c.fail(met, Origin::kOption);
  };
  EXPECT_EQ(run_on_ranks(options, {}, body), kExitInternal);
  EXPECT_NE(told.message().find("no such luck"), std::string::npos) << told.to_string();
}

TEST(Usage, OptionsOfRanksNeedRanks) {
  RankOptions options;
  EXPECT_TRUE(check_rank_options(options).ok());
  options.transport = "batched";
  EXPECT_EQ(check_rank_options(options).code(), StatusCode::kInvalidArgument);
  options.ranks = 1;
  EXPECT_TRUE(check_rank_options(options).ok()) << "a world of one rank";
  options.tp = 2;
  EXPECT_EQ(check_rank_options(options).code(), StatusCode::kInvalidArgument);
  options.ranks = 2;
  EXPECT_TRUE(check_rank_options(options).ok());
  // Nobody waits, and no expert moves, on one rank.
  RankOptions waits;
  waits.timeout_s = 5;
  EXPECT_NE(check_rank_options(waits).message().find("--timeout"), std::string::npos);
  RankOptions moves;
  moves.ranks = 1;
  moves.eplb = true;
  EXPECT_NE(check_rank_options(moves).message().find("--eplb: got it with 1 rank"),
            std::string::npos);
}

int inspect(const std::string& folder) {
  CLI::App root("", "moesaic");
  const Verb verb = make_inspect(root);
  const std::vector<const char*> words = {"moesaic", "inspect", folder.c_str()};
  root.parse(static_cast<int>(words.size()), words.data());
  return verb.run();
}

TEST(Inspect, ALayerThatCannotBeLoadedIsAnError) {
  const std::string model = test::bundled_model("mini-qwen3-moe");
  EXPECT_EQ(inspect(model), kExitOk);
  const fs::path copy =
      fs::temp_directory_path() / ("moesaic-inspect-" + std::to_string(::getpid()));
  fs::copy(model, copy);
  std::ostringstream text;
  text << std::ifstream(copy / "config.json").rdbuf();
  std::string config = text.str();
  const std::string field = "\"moe_intermediate_size\": ";
  ASSERT_NE(config.find(field), std::string::npos);
  config.insert(config.find(field) + field.size(), "2");  // 128 -> 2128
  fs::remove(copy / "config.json");
  std::ofstream(copy / "config.json") << config;
  EXPECT_EQ(inspect(copy.string()), kExitBadInput);
  fs::remove_all(copy);
}

}  // namespace
}  // namespace moesaic::tool
