#include "checkpoint/large_headers.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

namespace moesaic::test {
namespace {

// The shortest entries there can be, hence the most tensors: 1.5 million in 100 MB.
std::uint64_t many_tensors(HeaderWriter& w, bool backwards, bool duplicate) {
  const std::uint64_t count = w.bytes() / 200 * 3;
  char text[160];
  w.add("{");
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t at = backwards ? count - 1 - i : i;
    const std::uint64_t id = duplicate && i + 1 == count ? 0 : i;
    std::snprintf(text, sizeof(text),
                  R"(%s"%llx":{"dtype":"U8","shape":[],"data_offsets":[%llu,%llu]})",
                  i == 0 ? "" : ",", static_cast<unsigned long long>(id),
                  static_cast<unsigned long long>(at), static_cast<unsigned long long>(at + 1));
    w.add(text);
  }
  w.add("}");
  return count;
}

std::uint64_t one_name(HeaderWriter& w, std::string_view piece) {
  w.add("{\"");
  w.repeat(piece, 100);
  w.add(R"(":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})");
  return 1;
}

// `open` + many `item` + `close`, as an unknown member of a good entry or as the whole header.
LargeHeader repeated(const char* name, StatusCode want, std::string_view open, std::string item,
                     std::string_view close, std::uint64_t data_bytes = 0) {
  return {name, want, [open, item = std::move(item), close, data_bytes](HeaderWriter& w) {
            w.add(open);
            w.repeat(item, 100);
            w.add(close);
            return data_bytes;
          }};
}

std::string object_of_many_keys() {
  std::string item = ",{";
  for (int i = 0; i < 64; ++i) item += (i > 0 ? ",\"" : "\"") + std::to_string(i) + "\":0";
  return item + "}";
}

std::vector<LargeHeader> make_headers() {
  constexpr auto kOk = StatusCode::kOk;
  constexpr auto kCorrupt = StatusCode::kCorruptFile;
  constexpr std::string_view kUnknown =
      R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[],"x":[0)";
  return {
      {"MostTensors", kOk, [](HeaderWriter& w) { return many_tensors(w, false, false); }},
      {"MostTensorsBackwards", kOk, [](HeaderWriter& w) { return many_tensors(w, true, false); }},
      {"LateDuplicate", kCorrupt, [](HeaderWriter& w) { return many_tensors(w, false, true); }},
      {"OneName", kOk, [](HeaderWriter& w) { return one_name(w, "nnnnnnnnnnnnnnnn"); }},
      {"OneEscapedName", kOk, [](HeaderWriter& w) { return one_name(w, "\\u00e9"); }},
      repeated("Nesting", StatusCode::kLimitExceeded, R"({"a":{"x":)", "[[[[[[[[[[[[[[[[", "}}"),
      repeated("LongNumber", kCorrupt, R"({"a":{"shape":[)", "1111111111111111", "]}}"),
      repeated("LongFraction", kCorrupt, R"({"a":{"shape":[0.)", "0101010101010101", "]}}"),
      repeated("LongShape", kOk, R"({"a":{"dtype":"U8","data_offsets":[0,1],"shape":[1)", ",1",
               "]}}", 1),
      repeated("MetadataValue", kOk, R"({"__metadata__":{"a":")", "vvvvvvvvvvvvvvvv", R"("}})"),
      repeated("UnknownStrings", kOk, kUnknown, R"(,"")", "]}}", 1),
      repeated("UnknownObjects", kOk, kUnknown, object_of_many_keys(), "]}}", 1),
      repeated("InvalidUtf8AtTheEnd", kCorrupt, "{\"", "nnnnnnnnnnnnnnnn", "\xff\":0}"),
  };
}

}  // namespace

HeaderWriter::HeaderWriter(std::ostream& out, std::uint64_t bytes) : out_(out), bytes_(bytes) {
  for (unsigned i = 0; i < 8; ++i) out_.put(static_cast<char>(bytes >> (8 * i) & 0xFF));
}

void HeaderWriter::add(std::string_view text) {
  out_.write(text.data(), static_cast<std::streamsize>(text.size()));
  written_ += text.size();
}

void HeaderWriter::repeat(std::string_view text, std::uint64_t reserve) {
  while (left() >= text.size() + reserve) add(text);
}

std::span<const LargeHeader> large_headers() {
  static const std::vector<LargeHeader> headers = make_headers();
  return headers;
}

void write_large_header(const LargeHeader& header, std::uint64_t bytes, std::ostream& out) {
  HeaderWriter writer(out, bytes);
  std::uint64_t data_bytes = header.fill(writer);
  writer.repeat("                                                                ", 0);
  writer.repeat(" ", 0);
  const std::string zeros(1 << 16, '\0');
  while (data_bytes > 0) {
    const std::uint64_t n = std::min<std::uint64_t>(data_bytes, zeros.size());
    out.write(zeros.data(), static_cast<std::streamsize>(n));
    data_bytes -= n;
  }
}

}  // namespace moesaic::test
