// The worked examples of the container format and the properties of its header reader.
#include <gtest/gtest.h>

#include <string>

#include "checkpoint/container/safetensors.h"
#include "checkpoint/container_support.h"
#include "support/random.h"

namespace moesaic::test {
namespace {

Result<checkpoint::SafetensorsHeader> parse(const std::string& file) {
  MOESAIC_ASSIGN_OR_RETURN(
      const std::uint64_t n,
      checkpoint::safetensors_header_bytes("f", std::as_bytes(std::span(file)), file.size()));
  return checkpoint::parse_safetensors_header("f", std::string_view(file).substr(8, n),
                                              file.size());
}

std::string i32(const std::string& shape, const std::string& offsets) {
  return R"({"test":{"dtype":"I32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}

TEST(Header, EmptyFilesInBothForms) {
  for (const char* hex : {"02000000000000007b7d", "08000000000000007b7d202020202020"}) {
    const auto h = parse(from_hex(hex));
    ASSERT_TRUE(h.ok()) << h.status().to_string();
    EXPECT_TRUE(h->tensors().empty());
  }
}

TEST(Header, PublishedVectorsLoad) {
  const std::string e4m3 = from_hex("4000000000000000") +
                           R"({"w":{"dtype":"F8_E4M3","shape":[2,2],"data_offsets":[0,4]}}    )" +
                           from_hex("38b87e00");
  ASSERT_EQ(e4m3.size(), 76U);
  const auto h = parse(e4m3);
  ASSERT_TRUE(h.ok()) << h.status().to_string();
  ASSERT_EQ(h->tensors().size(), 1U);
  const checkpoint::TensorInfo& w = h->tensors()[0];
  EXPECT_EQ(w.name, "w");
  EXPECT_EQ(w.dtype, DType::kF8E4M3);
  EXPECT_EQ(w.shape, Shape({2, 2}));
  EXPECT_EQ(h->data_offset(), 72U);
  EXPECT_EQ(h->find("w"), &w);
  EXPECT_EQ(h->find("v"), nullptr);

  const std::string f4 = from_hex("3800000000000000") +
                         R"({"a":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}} )" +
                         from_hex("21f7");
  ASSERT_EQ(f4.size(), 66U);
  EXPECT_TRUE(parse(f4).ok());
}

TEST(Header, ShapeOffsetsAndFileMustAgree) {
  const std::string good = i32("[2,2]", "[0,16]");
  ASSERT_EQ(good.size(), 0x3CU);
  EXPECT_TRUE(parse(container(good, std::string(16, 'x'))).ok());
  struct Case {
    std::string file;
    StatusCode code;
    std::vector<std::string> words;
  };
  const auto corrupt = StatusCode::kCorruptFile;
  const auto limit = StatusCode::kLimitExceeded;
  const std::string data(16, 'x');
  const std::vector<Case> cases = {
      {container(good, data + "x"), corrupt, {"incomplete buffer", "got 17", "need 16"}},
      {container(good, data.substr(2)), corrupt, {"incomplete buffer", "got 14", "need 16"}},
      {container(i32("[2,2]", "[0,4]"), data),
       corrupt,
       {"\"test\"", "[0, 4]", "need 16", "[2, 2]"}},
      {container(i32("[2,18446744073709551614]", "[0,16]"), data), limit, {"\"test\"", "overflow"}},
      {container(i32("[4611686018427387904,1]", "[0,16]"), data), limit, {"overflow", "bits"}},
      {container(i32("[2,2]", "[16,0]"), data), corrupt, {"[16, 0]", "begin <= end"}},
      {container(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "xx"),
       corrupt,
       {"misaligned", "12 bits"}},
      {container(R"({"a":{"dtype":"f32","shape":[1],"data_offsets":[0,4]}})", "xxxx"),
       corrupt,
       {"dtype", "\"f32\""}},
  };
  for (const Case& c : cases) {
    const auto h = parse(c.file);
    ASSERT_FALSE(h.ok()) << c.file;
    EXPECT_EQ(mismatch(h.status(), c.code, c.words), "");
  }
  EXPECT_TRUE(parse(container(i32("[]", "[0,4]"), "xxxx")).ok());
  EXPECT_TRUE(parse(container(i32("[2,0]", "[0,0]"), "")).ok());
  EXPECT_TRUE(
      parse(container(R"({"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}})", "xxx"))
          .ok());
}

std::string two(const char* a, const char* b, const char* a_len = "4", const char* b_len = "4") {
  const auto one = [](const std::string& name, const std::string& len, const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":"U8","shape":[)" + len + R"(],"data_offsets":)" + offsets +
           "}";
  };
  return "{" + one("a", a_len, a) + "," + one("b", b_len, b) + "}";
}

TEST(Header, TensorsTileTheDataInAnyOrder) {
  for (const auto& [a, b] : {std::pair("[0,4]", "[4,8]"), std::pair("[4,8]", "[0,4]")}) {
    const auto h = parse(container(two(a, b), "12345678"));
    ASSERT_TRUE(h.ok()) << h.status().to_string();
    EXPECT_EQ(h->tensors()[0].begin, 0U);  // in the order of the data
    EXPECT_EQ(h->tensors()[1].begin, 4U);
    EXPECT_EQ(h->find("a")->begin, a == std::string("[0,4]") ? 0U : 4U);
    EXPECT_EQ(h->find("a")->name, "a");
  }
  const std::pair<const char*, std::vector<std::string>> bad[] = {
      {"[5,9]", {"\"b\"", "hole", "need begin 4"}},
      {"[2,6]", {"\"b\"", "overlaps", "\"a\""}},
      {"[0,4]", {"\"b\"", "overlaps"}},
  };
  for (const auto& [offsets, words] : bad) {
    const auto h = parse(container(two("[0,4]", offsets), "123456789"));
    ASSERT_FALSE(h.ok());
    EXPECT_EQ(mismatch(h.status(), StatusCode::kCorruptFile, words), "");
  }
}

TEST(Header, ManyTensorsInReverseOrderAreSortedAndFound) {
  std::string header = "{";
  const int n = 1000;
  for (int i = n; i-- > 0;) {
    header += "\"t" + std::to_string(i) + R"(":{"dtype":"U8","shape":[2],"data_offsets":[)" +
              std::to_string(2 * i) + "," + std::to_string(2 * i + 2) + "]}" + (i > 0 ? "," : "}");
  }
  const auto h = parse(container(header, std::string(2 * n, 'x')));
  ASSERT_TRUE(h.ok()) << h.status().to_string();
  for (int i = 0; i < n; ++i) {
    const checkpoint::TensorInfo* t = h->find("t" + std::to_string(i));
    ASSERT_NE(t, nullptr);
    EXPECT_EQ(t, &h->tensors()[static_cast<std::size_t>(i)]);
    EXPECT_EQ(t->begin, static_cast<std::uint64_t>(2 * i));
  }
  // One name twice among many is still found.
  header.replace(header.find("\"t7\""), 4, "\"t8\"");
  const auto bad = parse(container(header, std::string(2 * n, 'x')));
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(mismatch(bad.status(), StatusCode::kCorruptFile, {"duplicate key \"t8\""}), "");
}

TEST(Header, IntegersAreExactBeyondDoublePrecision) {
  // 2^53 + 1 elements whose offsets a double would round to match.
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[9007199254740993],"data_offsets":[0,9007199254740992]}})";
  const auto h = parse(container(header, ""));
  ASSERT_FALSE(h.ok());
  EXPECT_EQ(mismatch(h.status(), StatusCode::kCorruptFile, {"9007199254740993"}), "");
  // The same with agreeing numbers gets as far as the size of the file.
  const std::string agree =
      R"({"a":{"dtype":"U8","shape":[9007199254740993],"data_offsets":[0,9007199254740993]}})";
  const auto short_file = parse(container(agree, ""));
  EXPECT_EQ(mismatch(short_file.status(), StatusCode::kCorruptFile,
                     {"incomplete buffer", "need 9007199254740993"}),
            "");
}

TEST(Header, MetadataIsKept) {
  const auto h = parse(container(R"({"__metadata__":{"format":"pt","note":"a\"b"}})", ""));
  ASSERT_TRUE(h.ok());
  EXPECT_EQ(h->metadata().at("format"), "pt");
  EXPECT_EQ(h->metadata().at("note"), "a\"b");
  EXPECT_TRUE(h->tensors().empty());
}

TEST(Header, RankAboveOursIsListedAndChecked) {
  const std::string six = R"({"a":{"dtype":"U8","shape":[1,1,1,1,2,3],"data_offsets":[0,6]}})";
  const auto h = parse(container(six, "123456"));
  ASSERT_TRUE(h.ok()) << h.status().to_string();
  EXPECT_EQ(h->find("a")->rank, 6);
  const std::string wrong = R"({"a":{"dtype":"U8","shape":[1,1,1,1,2,3],"data_offsets":[0,5]}})";
  const auto bad = parse(container(wrong, "12345"));
  EXPECT_EQ(mismatch(bad.status(), StatusCode::kCorruptFile, {"need 6", "rank 6"}), "");
}

// What must hold for any header that was accepted: every tensor lies in the data, they tile it, and
// dtype and shape give exactly the bytes.
void expect_in_bounds(const checkpoint::SafetensorsHeader& h, std::size_t file_bytes) {
  std::uint64_t end = 0;
  for (const checkpoint::TensorInfo& t : h.tensors()) {
    ASSERT_EQ(t.begin, end);
    ASSERT_LE(t.begin, t.end);
    end = t.end;
    if (t.rank <= kMaxRank) {
      ASSERT_EQ(static_cast<std::uint64_t>(contiguous_bytes(t.dtype, t.shape).value()), t.bytes());
    }
    ASSERT_EQ(h.find(t.name), &t);
  }
  ASSERT_EQ(h.data_offset() + end, file_bytes);
}

std::string small_file() {
  return container(
      R"({"__metadata__":{"format":"pt"},"gate":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},)"
      R"("w":{"dtype":"F4","shape":[3,4],"data_offsets":[8,14]},"e":{"dtype":"BF16","shape":[0,4],)"
      R"("data_offsets":[14,14]},"s":{"dtype":"U8","shape":[],"data_offsets":[14,15]}}  )",
      "0123456789abcde");
}

TEST(HeaderProperty, EveryTruncationIsRefused) {
  const std::string file = small_file();
  ASSERT_TRUE(parse(file).ok()) << parse(file).status().to_string();
  for (std::size_t n = 0; n < file.size(); ++n) EXPECT_FALSE(parse(file.substr(0, n)).ok()) << n;
  EXPECT_FALSE(parse(file + "x").ok());
}

TEST(HeaderProperty, EveryByteChangeIsRefusedOrStaysInBounds) {
  const std::string good = small_file();
  int accepted = 0;
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (int value = 0; value < 256; ++value) {
      std::string file = good;
      file[i] = static_cast<char>(value);
      const auto h = parse(file);
      if (!h.ok()) {
        EXPECT_TRUE(h.status().code() == StatusCode::kCorruptFile ||
                    h.status().code() == StatusCode::kLimitExceeded)
            << h.status().to_string();
        continue;
      }
      ++accepted;
      ASSERT_NO_FATAL_FAILURE(expect_in_bounds(*h, file.size())) << i << " " << value;
    }
  }
  EXPECT_GT(accepted, 15 * 256);  // at least every change of the data itself
}

TEST(HeaderProperty, RandomSplicesAreRefusedOrStayInBounds) {
  const std::string good = small_file();
  Rng rng(20);
  const std::string_view pieces[] = {"0",    "-1",        "1e9", "18446744073709551615",
                                     "[",    "]",         "{",   "}",
                                     "\"",   ",",         ":",   "\\u0000",
                                     "null", "\"shape\"", " ",   "\n"};
  for (int round = 0; round < 20000; ++round) {
    std::string file = good;
    const auto edits = rng.integer(1, 4);
    for (std::int64_t e = 0; e < edits; ++e) {
      const auto at =
          static_cast<std::size_t>(rng.integer(8, static_cast<std::int64_t>(file.size()) - 1));
      const auto cut = static_cast<std::size_t>(rng.integer(0, 3));
      file.replace(at, cut, pieces[static_cast<std::size_t>(rng.integer(0, 15))]);
    }
    // Keep the length field right half of the time, so that edits reach the later checks.
    if (rng.integer(0, 1) == 0 && file.size() > 8 + 15) {
      file = container(file.substr(8, file.size() - 8 - 15), file.substr(file.size() - 15));
    }
    const auto h = parse(file);
    if (!h.ok()) continue;
    ASSERT_NO_FATAL_FAILURE(expect_in_bounds(*h, file.size())) << file;
  }
}

}  // namespace
}  // namespace moesaic::test
