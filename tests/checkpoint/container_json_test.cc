#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"
#include "checkpoint/container_support.h"
#include "core/nearest_name.h"
#include "support/refusal.h"

namespace moesaic::test {
namespace {

constexpr checkpoint::JsonLimits kLimits{.max_bytes = 1000, .max_depth = 4};

Result<nlohmann::json> parse_json(std::string_view text) {
  return checkpoint::parse_json_document("f", text, kLimits);
}

TEST(JsonDocument, KeepsValuesExactly) {
  const auto d =
      parse_json(R"({"u":18446744073709551615,"n":-9223372036854775808,"f":1.0,"b":true,)"
                 R"("z":null,"s":"\u00e9","a":[1,[2]],"o":{"p":{}}})");
  ASSERT_TRUE(d.ok()) << d.status().to_string();
  EXPECT_EQ((*d)["u"].get<std::uint64_t>(), 18446744073709551615ULL);
  EXPECT_TRUE((*d)["u"].is_number_unsigned());
  EXPECT_EQ((*d)["n"].get<std::int64_t>(), std::numeric_limits<std::int64_t>::min());
  EXPECT_TRUE((*d)["f"].is_number_float());
  EXPECT_TRUE((*d)["b"].get<bool>());
  EXPECT_TRUE((*d)["z"].is_null());
  EXPECT_EQ((*d)["s"].get<std::string>(), "\xc3\xa9");
  EXPECT_EQ((*d)["a"].dump(), "[1,[2]]");
  EXPECT_EQ((*d)["o"].dump(), R"({"p":{}})");
  EXPECT_EQ(parse_json("3")->get<int>(), 3);
}

TEST(JsonDocument, RefusesWithReason) {
  const auto corrupt = StatusCode::kCorruptFile;
  EXPECT_EQ(
      mismatch(parse_json(R"({"a":1,"a":2})").status(), corrupt, {"f: ", "duplicate key \"a\""}),
      "");
  EXPECT_EQ(
      mismatch(parse_json(R"({"x":{"b":1,"b":2}})").status(), corrupt, {"duplicate key \"b\""}),
      "");
  EXPECT_EQ(mismatch(parse_json("{").status(), corrupt, {"not valid JSON", "byte 2"}), "");
  EXPECT_EQ(mismatch(parse_json("").status(), corrupt, {"not valid JSON"}), "");
  EXPECT_EQ(mismatch(parse_json("{} x").status(), corrupt, {"not valid JSON"}), "");
  EXPECT_EQ(mismatch(parse_json("1e999").status(), corrupt, {"not valid JSON"}), "");
  EXPECT_EQ(mismatch(parse_json(std::string("{}\0", 3)).status(), corrupt, {"NUL", "position 2"}),
            "");
  EXPECT_EQ(mismatch(parse_json("\xEF\xBB\xBF{}").status(), corrupt, {"byte order mark"}), "");
  EXPECT_EQ(mismatch(parse_json("{\"\xff\":1}").status(), corrupt, {"not UTF-8", "position 2"}),
            "");
  EXPECT_EQ(mismatch(parse_json("[[[[[]]]]]").status(), StatusCode::kLimitExceeded,
                     {"nesting", "at most 4"}),
            "");
  EXPECT_TRUE(parse_json("[[[[]]]]").ok());
  EXPECT_EQ(mismatch(parse_json(std::string(1001, ' ')).status(), StatusCode::kLimitExceeded,
                     {"got 1001", "at most 1000"}),
            "");
}

// In the text's order, and without a search for each key: what stands twice is seen when its object ends,
// not before, and append_member takes it for new. A search among 150000 members takes minutes.
TEST(JsonDocument, OrderedMembersAreAppended) {
  const std::string text = R"({"b":{"z":1,"a":[true,{}]},"a":-0.5,"":{"2":2,"1":1,"3":3}})";
  const auto json = checkpoint::parse_ordered_json_document("x.json", text, {1000, 8});
  ASSERT_TRUE(json.ok()) << json.status().to_string();
  EXPECT_EQ(json->dump(), text);
  nlohmann::ordered_json made = nlohmann::ordered_json::object();
  for (const int value : {1, 2}) checkpoint::append_member(&made, "a", value);
  EXPECT_EQ(made.dump(), R"({"a":1,"a":2})");
  expect_refusal(
      checkpoint::parse_ordered_json_document("x.json", R"({"a":1,"a":2,)", {99, 8}).status(),
      StatusCode::kCorruptFile, {"x.json", "unexpected end"});
  for (const char* twice : {R"({"a":1,"b":2,"a":3})", R"([{"b":{"x":{},"x":{}}}])"}) {
    expect_refusal(checkpoint::parse_ordered_json_document("x.json", twice, {99, 8}).status(),
                   StatusCode::kCorruptFile, {"x.json: duplicate key"});
  }
}

TEST(Utf8, FindsTheFirstBadByte) {
  EXPECT_EQ(checkpoint::first_invalid_utf8("plain ascii, more than eight"), 28U);
  EXPECT_EQ(checkpoint::first_invalid_utf8("\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"), 9U);
  EXPECT_EQ(checkpoint::first_invalid_utf8("\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf"),
            10U);  // the edges
  const std::pair<std::string_view, std::size_t> bad[] = {
      {"12345678\x80", 8},      {"a\xc0\x80", 1},
      {"a\xc1\xbf", 1},         {"a\xe0\x9f\xbf", 1},
      {"a\xed\xa0\x80", 1},     {"a\xf0\x8f\xbf\xbf", 1},
      {"a\xf4\x90\x80\x80", 1}, {"a\xf5\x80\x80\x80", 1},
      {"a\xe2\x82", 1},         {"a\xc3", 1},
      {"a\xe2\x82x", 1},        {"\xff", 0},
  };
  for (const auto& [text, at] : bad) EXPECT_EQ(checkpoint::first_invalid_utf8(text), at);
}

TEST(Names, AreSafeToPrint) {
  EXPECT_EQ(checkpoint::quote_name("a.b"), "\"a.b\"");
  EXPECT_EQ(checkpoint::quote_name("\x1b[31m\n\x7f"), "\"\\x1b[31m\\x0a\\x7f\"");
  EXPECT_EQ(checkpoint::quote_name("\xc3\xa9"), "\"\xc3\xa9\"");
  EXPECT_EQ(checkpoint::quote_name("\xc2\x9b"),
            "\"\\xc2\\x9b\"");  // a one-character escape sequence starter
  EXPECT_EQ(checkpoint::quote_name("\xff"), "\"\\xff\"");
  const std::string long_name = checkpoint::quote_name(std::string(1000, 'x'));
  EXPECT_LT(long_name.size(), 200U);
  EXPECT_NE(long_name.find("(1000 bytes)"), std::string::npos);
  // The cut falls between characters.
  std::string wide;
  while (wide.size() < 400) wide += "\xe2\x82\xac";
  const std::string cut = checkpoint::quote_name(wide);
  EXPECT_EQ(checkpoint::first_invalid_utf8(cut), cut.size());
}

TEST(Names, WhatATerminalActsOnIsEscapedAndNothingElse) {
  EXPECT_EQ(checkpoint::escape_controls("a\tb\nc\r\x1b]0;x\x07"),
            "a\\x09b\\x0ac\\x0d\\x1b]0;x\\x07");
  EXPECT_EQ(checkpoint::escape_controls("a\nb\x1b", /*keep_newlines=*/true), "a\nb\\x1b");
  // The direction of writing, line separators.
  EXPECT_EQ(checkpoint::escape_controls("\xe2\x80\xae"
                                        "x\xe2\x81\xa9\xe2\x80\xa8\xd8\x9c"),
            "\\xe2\\x80\\xaex\\xe2\\x81\\xa9\\xe2\\x80\\xa8\\xd8\\x9c");
  const std::string plain =
      "\xc3\xa9 \xe2\x96\x88 \xe2\x80\x94 \xf0\x9f\x98\x80 \"quoted\" back\\slash";
  EXPECT_EQ(checkpoint::escape_controls(plain), plain);
  // Bytes that are not UTF-8 alone, between characters that are.
  EXPECT_EQ(checkpoint::escape_controls("\xc3\xa9\xff\xc3\xa9\x9b\xe2\x80"),
            "\xc3\xa9\\xff\xc3\xa9\\x9b\\xe2\\x80");
  EXPECT_EQ(checkpoint::escape_controls(""), "");
}

TEST(Names, Nearest) {
  const std::string_view names[] = {"mixtral", "qwen3_moe", "deepseek_v3", "deepseek_v2"};
  EXPECT_EQ(checkpoint::similar_name("deepseek_v4", names), "deepseek_v3");  // ties go to the first
  EXPECT_EQ(checkpoint::similar_name("qwen3moe", names), "qwen3_moe");
  EXPECT_EQ(checkpoint::similar_name("zzzzzzzzzz", names), "");
  EXPECT_EQ(checkpoint::similar_name("x", {}), "");
  EXPECT_EQ(nearest_name("QWEN3_MO", names), "qwen3_moe");  // whatever the case
  // What contains the name comes before what needs fewer edits.
  const std::string_view schemes[] = {"f32", "int8", "fp8-tensor", "fp8-block"};
  EXPECT_EQ(nearest_name("FP8", schemes), "fp8-block");
}

}  // namespace
}  // namespace moesaic::test
