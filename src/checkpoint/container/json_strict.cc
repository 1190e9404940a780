#include "checkpoint/container/json_strict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <utility>

#include "checkpoint/container/guard.h"
#include "checkpoint/container/names.h"

namespace moesaic::checkpoint {
namespace {

constexpr std::size_t kMaxReasonBytes = 200;

// Forwards the parser's events, counts the depth and keeps the parser's complaint.
class SaxAdapter final : public nlohmann::json_sax<nlohmann::json> {
 public:
  SaxAdapter(std::string_view label, int max_depth, JsonEvents& events)
      : label_(label), max_depth_(max_depth), events_(events) {}

  bool null() override { return events_.on_null(); }
  bool boolean(bool value) override { return events_.on_bool(value); }
  bool number_integer(number_integer_t value) override { return events_.on_negative(value); }
  bool number_unsigned(number_unsigned_t value) override { return events_.on_unsigned(value); }
  bool number_float(number_float_t value, const string_t& literal) override {
    return events_.on_real(value, literal);
  }
  bool string(string_t& value) override { return events_.on_string(value); }
  bool binary(binary_t&) override { return false; }  // not part of JSON text
  bool key(string_t& value) override { return events_.on_key(value); }
  bool start_object(std::size_t) override { return open() && events_.on_start_object(); }
  bool end_object() override {
    --depth_;
    return events_.on_end_object();
  }
  bool start_array(std::size_t) override { return open() && events_.on_start_array(); }
  bool end_array() override {
    --depth_;
    return events_.on_end_array();
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // The parser quotes the offending token, which may be as long as the file.
    std::string_view what = error.what();
    if (const auto skip = what.find("] "); skip != std::string_view::npos)
      what.remove_prefix(skip + 2);
    if (const auto skip = what.find(": "); skip < 64) what.remove_prefix(skip + 2);
    std::string reason = quote_name(what.substr(0, kMaxReasonBytes));
    status_ = Status(StatusCode::kCorruptFile,
                     fmt::format("{}: not valid JSON near byte {}: {}", label_, position, reason));
    return false;
  }

  const Status& status() const { return status_; }

 private:
  bool open() {
    if (++depth_ <= max_depth_) return true;
    status_ =
        Status(StatusCode::kLimitExceeded,
               fmt::format("{}: JSON nesting: got {} open objects and arrays, need at most {}",
                           label_, depth_, max_depth_));
    return false;
  }

  std::string_view label_;
  int max_depth_;
  int depth_ = 0;
  JsonEvents& events_;
  Status status_;
};

// Builds a document; the stack points into it. Keys of nlohmann::json are searched, those of
// ordered_json appended: a search there looks at all of them.
template <class Json>
class DocumentBuilder final : public JsonEvents {
 public:
  bool on_null() override { return add(nullptr); }
  bool on_bool(bool value) override { return add(value); }
  bool on_unsigned(std::uint64_t value) override { return add(value); }
  bool on_negative(std::int64_t value) override { return add(value); }
  bool on_real(double value, std::string_view) override { return add(value); }
  bool on_string(std::string_view value) override { return add(std::string(value)); }
  bool on_key(std::string_view key) override {
    key_ = key;
    if constexpr (kOrdered) return true;
    return !stack_.back()->contains(key_) || fail(key_);
  }
  bool on_start_object() override { return add(Json::object()); }
  bool on_end_object() override { return has_new_keys(*stack_.back()) && pop(); }
  bool on_start_array() override { return add(Json::array()); }
  bool on_end_array() override { return pop(); }

  bool has_duplicate() const { return has_duplicate_; }
  const std::string& duplicate() const { return duplicate_; }
  Json take() { return std::move(root_); }

 private:
  static constexpr bool kOrdered = std::is_same_v<Json, nlohmann::ordered_json>;

  bool add(Json value) {
    Json* place = &root_;
    if (!stack_.empty()) {
      Json& parent = *stack_.back();
      if (!parent.is_object()) {
        parent.push_back(nullptr);
        place = &parent.back();
      } else if constexpr (kOrdered) {
        append_member(&parent, key_, nullptr);
        place = &parent.template get_ref<typename Json::object_t&>().back().second;
      } else {
        place = &parent[key_];
      }
    }
    *place = std::move(value);
    if (place->is_structured()) stack_.push_back(place);
    return true;
  }
  bool pop() {
    stack_.pop_back();
    return true;
  }
  bool fail(std::string_view duplicate) {
    duplicate_ = duplicate;
    has_duplicate_ = true;
    return false;
  }
  // Of a whole object whose keys were appended.
  bool has_new_keys(const Json& object) {
    if constexpr (kOrdered) {
      std::vector<std::string_view> keys;
      for (const auto& [key, value] : object.template get_ref<const typename Json::object_t&>()) {
        keys.push_back(key);
      }
      std::sort(keys.begin(), keys.end());
      const auto twice = std::adjacent_find(keys.begin(), keys.end());
      if (twice != keys.end()) return fail(*twice);
    }
    return true;
  }

  Json root_;
  // Open containers; a parent does not grow while a child is open.
  std::vector<Json*> stack_;
  std::string key_;
  std::string duplicate_;
  bool has_duplicate_ = false;
};

template <class Json>
Result<Json> parse_document(std::string_view label, std::string_view text,
                            const JsonLimits& limits) {
  return guard_allocation(label, [&]() -> Result<Json> {
    DocumentBuilder<Json> builder;
    MOESAIC_RETURN_IF_ERROR(parse_json_events(label, text, limits, builder));
    if (builder.has_duplicate()) {
      return Status(StatusCode::kCorruptFile,
                    fmt::format("{}: duplicate key {}", label, quote_name(builder.duplicate())));
    }
    return builder.take();
  });
}

// Length of the well-formed sequence that starts with a byte >= 0x80, or 0 (table 3-7 of the
// Unicode standard).
std::size_t utf8_sequence(const unsigned char* p, std::size_t left) {
  const unsigned char lead = p[0];
  std::size_t length = 0;
  unsigned char low = 0x80;  // bounds of the second byte
  unsigned char high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;   // overlong
    if (lead == 0xED) high = 0x9F;  // surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;   // overlong
    if (lead == 0xF4) high = 0x8F;  // above U+10FFFF
  }
  if (length == 0 || left < length || p[1] < low || p[1] > high) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if ((p[i] & 0xC0) != 0x80) return 0;
  }
  return length;
}

}  // namespace

std::size_t first_invalid_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  std::size_t i = 0;
  while (i < text.size()) {
    std::uint64_t word = 0;
    if (text.size() - i >= sizeof(word)) {  // eight ASCII bytes at once
      std::memcpy(&word, p + i, sizeof(word));
      if ((word & 0x8080808080808080ULL) == 0) {
        i += sizeof(word);
        continue;
      }
    }
    if (p[i] < 0x80) {
      ++i;
      continue;
    }
    const std::size_t length = utf8_sequence(p + i, text.size() - i);
    if (length == 0) return i;
    i += length;
  }
  return i;
}

Status parse_json_events(std::string_view label, std::string_view text, const JsonLimits& limits,
                         JsonEvents& events) {
  return guard_allocation(label, [&]() -> Status {
    if (text.size() > limits.max_bytes) {
      return Status(StatusCode::kLimitExceeded,
                    fmt::format("{}: JSON text: got {} bytes, need at most {}", label, text.size(),
                                limits.max_bytes));
    }
    if (const std::size_t bad = first_invalid_utf8(text); bad != text.size()) {
      return Status(StatusCode::kCorruptFile,
                    fmt::format("{}: not UTF-8: byte 0x{:02x} at position {}", label,
                                static_cast<unsigned char>(text[bad]), bad));
    }
    // The parser below would skip a byte order mark and take a NUL byte for the end of the text.
    if (text.substr(0, 3) == "\xEF\xBB\xBF") {
      return Status(StatusCode::kCorruptFile,
                    fmt::format("{}: not valid JSON: starts with a byte order mark", label));
    }
    if (const auto nul = text.find('\0'); nul != std::string_view::npos) {
      return Status(StatusCode::kCorruptFile,
                    fmt::format("{}: not valid JSON: NUL byte at position {}", label, nul));
    }
    SaxAdapter adapter(label, limits.max_depth, events);
    nlohmann::json::sax_parse(text.data(), text.data() + text.size(), &adapter);
    return adapter.status();
  });
}

Result<nlohmann::json> parse_json_document(std::string_view label, std::string_view text,
                                           const JsonLimits& limits) {
  return parse_document<nlohmann::json>(label, text, limits);
}

Result<nlohmann::ordered_json> parse_ordered_json_document(std::string_view label,
                                                           std::string_view text,
                                                           const JsonLimits& limits) {
  return parse_document<nlohmann::ordered_json>(label, text, limits);
}

void append_member(nlohmann::ordered_json* object, std::string key, nlohmann::ordered_json value) {
  object->get_ref<nlohmann::ordered_json::object_t&>().emplace_back(std::move(key),
                                                                    std::move(value));
}

bool UnknownJson::start_object() {
  ++depth_;
  if (num_open_ == open_.size()) open_.emplace_back();
  open_[num_open_++].clear();
  return true;
}

bool UnknownJson::end_object() {
  --depth_;
  --num_open_;
  return true;
}

bool UnknownJson::start_array() {
  ++depth_;
  return true;
}

bool UnknownJson::end_array() {
  --depth_;
  return true;
}

void UnknownJson::Keys::clear() {
  hashes.clear();
  ends.clear();
  text.clear();
}

bool UnknownJson::add(Keys& keys, std::string_view key) {
  const std::uint64_t hash = std::hash<std::string_view>{}(key);
  const std::string_view text = keys.text;
  for (std::size_t i = 0; i < keys.hashes.size(); ++i) {
    if (keys.hashes[i] != hash) continue;
    const std::size_t begin = i == 0 ? 0 : keys.ends[i - 1];
    if (text.substr(begin, keys.ends[i] - begin) != key) continue;
    code_ = StatusCode::kCorruptFile;
    reason_ = fmt::format("duplicate key {}", quote_name(key));
    return false;
  }
  if (keys.hashes.size() >= kMaxKeys) {
    code_ = StatusCode::kLimitExceeded;
    reason_ = fmt::format("unknown keys in one object: need at most {}", kMaxKeys);
    return false;
  }
  keys.hashes.push_back(hash);
  keys.text += key;
  keys.ends.push_back(keys.text.size());
  return true;
}

}  // namespace moesaic::checkpoint
