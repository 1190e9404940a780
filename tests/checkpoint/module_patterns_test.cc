// The regular expressions and shell patterns by which descriptions name modules.
#include "checkpoint/config/module_patterns.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/container_support.h"

namespace moesaic::test {
namespace {

TEST(ModulePatterns, RegularExpressionsMatchFromTheStartOnly) {
  const auto matches = [](const std::string& pattern, std::string_view name) {
    return checkpoint::regex_matches("f", pattern, name).value();
  };
  EXPECT_TRUE(matches("model.*gate", "model.layers.0.mlp.gate"));
  EXPECT_TRUE(matches("model", "model.layers"));  // not anchored at the end
  EXPECT_FALSE(matches("layers", "model.layers"));
  EXPECT_TRUE(matches(".*layers", "model.layers.0"));
  EXPECT_FALSE(matches(".*gate$", "model.mlp.gate_proj"));
  EXPECT_TRUE(matches(".*(q|k|v)_proj", "a.k_proj"));
  EXPECT_TRUE(matches(".*layers\\.(1|2)\\..*", "model.layers.2.mlp"));
  EXPECT_FALSE(matches(".*layers\\.(1|2)\\..*", "model.layers.12.mlp"));
  for (const char* bad : {"(", "[a", "*", "a{2,1}", "(a)\\1"}) {
    EXPECT_EQ(mismatch(checkpoint::regex_matches("f", bad, "a").status(), StatusCode::kUnsupported,
                       {"f: regular expression", bad == std::string("(a)\\1") ? "(a)" : bad}),
              "");
  }
  // Python's names for both ends, and a backslash before such a letter.
  EXPECT_TRUE(matches(R"(.*mlp\.experts\..*\Z)", "model.mlp.experts.0.up_proj"));
  EXPECT_FALSE(matches(R"(\Amodel\.mlp\Z)", "model.mlp.gate"));
  EXPECT_TRUE(matches(R"((\Amodel|x)\.mlp\Z)", "model.mlp"));
  EXPECT_FALSE(matches(R"(a\\Z)", "aZ"));
  EXPECT_TRUE(matches(R"(a\\Z)", R"(a\Z)"));
  EXPECT_TRUE(checkpoint::regex_hits(R"(.*gate\Z)", "mlp.gate"));
  EXPECT_TRUE(matches(R"(\w+\.\d\b\x2Egate)", "layers.3.gate"));
  for (const char letter : {'G', 'z', 'K', 'c', 'p', 'N', 'E', 'a'}) {
    const std::string pattern = std::string("mlp\\") + letter;
    EXPECT_EQ(mismatch(checkpoint::regex_matches("f", pattern, "mlp").status(),
                       StatusCode::kUnsupported, {"has the escape", pattern.substr(3)}),
              "");
    EXPECT_FALSE(checkpoint::regex_hits(pattern, std::string("mlp") + letter));
  }
  // Exponential for an engine that backtracks.
  EXPECT_FALSE(matches("(a|aa|aaa)*b", std::string(200, 'a')));
}

// Compiled, a count is as many copies: patterns come from untrusted files, and are kept.
// Python's syntax is what is written; what would be read as something else is refused.
TEST(ModulePatterns, AreReadAsPythonReadsThem) {
  const auto match = [](const char* pattern, const char* name) {
    const Result<bool> hit = checkpoint::regex_matches("targets", pattern, name);
    return hit.ok() ? (*hit ? "yes" : "no") : hit.status().to_string();
  };
  for (const auto& [pattern, name] :
       {std::pair{".*(?=gate).*", "mlp.gate"}, std::pair{"(?:a|b)*?c", "abc"},
        std::pair{"a+?b{1,2}?", "aab"}, std::pair{"[a\\]b[]+$", "a]b["},
        std::pair{"(?!lm_head)[\\w.-]+$", "a.b-c"}, std::pair{"[[a]b", "[b"}}) {
    EXPECT_EQ(match(pattern, name), "yes") << pattern;
  }
  for (const auto& [pattern, why] :
       {std::pair{"(?i).*MLP.*", "not supported"}, std::pair{"(?P<x>a)", "not supported"},
        std::pair{"(?<=a)b", "not supported"}, std::pair{".*[[:digit:]]", "[: in a set"},
        std::pair{"[]0-9]+", "begins with ]"}, std::pair{"[^]a]", "begins with ]"},
        std::pair{"a++a", "two counts"}, std::pair{"a{2}{2}", "two counts"},
        std::pair{"a??+", "two counts"}, std::pair{"\xc3\xa9+", "outside ASCII"},
        std::pair{"\\Gx", "the escape \\G"}}) {
    EXPECT_NE(match(pattern, "model.layers.1").find(why), std::string::npos)
        << pattern << ": " << match(pattern, "model.layers.1");
  }
}

TEST(ModulePatterns, WhatARegularExpressionBecomesIsBounded) {
  EXPECT_EQ(
      checkpoint::regex_matches("f", "model\\.layers\\.[0-9]{1,3}\\..*", "model.layers.12.mlp")
          .value(),
      true);
  for (const char* hostile :
       {"(a{999}){99}", "((((a{9}){9}){9}){9}){9}", "a{99999999999999999999}", "(a{50,}b){400}"}) {
    EXPECT_EQ(mismatch(checkpoint::regex_matches("f", hostile, "a").status(),
                       StatusCode::kUnsupported, {"f: regular expression", "repeats too much"}),
              "");
  }
}

// Without these texts a name is no match, and the expression need not be run.
TEST(ModulePatterns, TextsThatEveryMatchHas) {
  using Texts = std::vector<std::string>;
  for (const auto& [pattern, texts] : std::vector<std::pair<std::string, Texts>>{
           {R"(.*layers\.3\.self_attn.*)", {"layers.3.self_attn"}},
           {R"(model\.layers\.[0-9]+\.mlp$)", {"model.layers.", ".mlp"}},
           {R"(.*mlp\.(gate|up)_proj.*)", {"mlp.", "_proj"}},
           {"ab*c?d+e{2}f", {"a", "d", "f"}},
           {R"(\d+\.gate)", {".gate"}},
           {"a|b", {}},
           {R"(a\x41b)", {}},
           {R"([\]]a)", {}},
           {"(a))b", {}},
           {"", {}}}) {
    EXPECT_EQ(checkpoint::texts_of_regex(pattern), texts) << pattern;
  }
  for (const auto& [pattern, texts] :
       std::vector<std::pair<std::string, Texts>>{{"model.layers.3.*", {"model.layers.3."}},
                                                  {"*mlp?gate*", {"mlp", "gate"}},
                                                  {"a*b[0-9]c", {"a", "b"}},
                                                  {"a\\*b", {"a"}}}) {
    EXPECT_EQ(checkpoint::texts_of_glob(pattern), texts) << pattern;
  }
  for (const char* pattern :
       {".*", "model.*gate", R"(.*layers\.(1|2)\..*)", R"(.*experts\.1\d?\.up.*)", "x|.*gate",
        "(?!.*gate).*", R"([^.]*\.layers\.2.*)", R"(.*\.(gate|up)_proj$)", "model{1,2}.*s?[.]"}) {
    for (const char* name :
         {"model.layers.1.mlp.gate", "model.layers.12.mlp.experts.1.up_proj", "lm_head", "",
          "model.layers.2.mlp.experts.10.gate_proj", "language_model.layers.2.mlp"}) {
      EXPECT_EQ(checkpoint::regex_hits(pattern, name),
                checkpoint::regex_matches("f", pattern, name).value())
          << pattern << " of " << name;
    }
  }
}

}  // namespace
}  // namespace moesaic::test
