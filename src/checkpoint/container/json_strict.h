// JSON from untrusted files: exact integers, no duplicate keys, bounded size and depth, no
// exceptions. Two forms: events (large headers and indices) and a document (config.json).
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "moesaic/status.h"

namespace moesaic::checkpoint {

struct JsonLimits {
  std::size_t max_bytes = 0;  // of the text; more is kLimitExceeded before anything is parsed
  int max_depth = 0;          // open objects and arrays; more is kLimitExceeded
};

// Receives a JSON text in order. Every function returns false to stop parsing; the receiver then
// keeps the reason itself. Integers arrive exactly: on_unsigned for 0 .. 2^64-1, on_negative below
// zero (and for "-0"), everything else (fractions, exponents, integers that do not fit) is on_real.
// Views are valid during the call only.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual bool on_null() = 0;
  virtual bool on_bool(bool value) = 0;
  virtual bool on_unsigned(std::uint64_t value) = 0;
  virtual bool on_negative(std::int64_t value) = 0;
  virtual bool on_real(double value, std::string_view literal) = 0;
  virtual bool on_string(std::string_view value) = 0;
  virtual bool on_key(std::string_view key) = 0;
  virtual bool on_start_object() = 0;
  virtual bool on_end_object() = 0;
  virtual bool on_start_array() = 0;
  virtual bool on_end_array() = 0;
};

// Parses one JSON value. `label` (a file name) begins every message.
// kCorruptFile: not UTF-8, not JSON (with the byte position), trailing text. kLimitExceeded: size
// or depth. When the receiver stops the parse the result is ok: ask the receiver. Duplicate keys
// are the receiver's business. Memory: O(longest string + depth). O(bytes).
Status parse_json_events(std::string_view label, std::string_view text, const JsonLimits& limits,
                         JsonEvents& events);

// The whole text as a document; include <nlohmann/json.hpp> to use it. Errors as above, and
// kCorruptFile for a duplicate key (named). Integers keep their exact value and signedness
// (is_number_unsigned / is_number_integer); an integer beyond 64 bits arrives as a float.
Result<nlohmann::json> parse_json_document(std::string_view label, std::string_view text,
                                           const JsonLimits& limits);

// The same with the members of every object as they stand in the text. O(bytes), but to find a member
// of such an object by its name looks at all of them.
Result<nlohmann::ordered_json> parse_ordered_json_document(std::string_view label,
                                                           std::string_view text,
                                                           const JsonLimits& limits);

// Puts a member at the end of an object that has none of this name, without a search for it.
void append_member(nlohmann::ordered_json* object, std::string key, nlohmann::ordered_json value);

// Members that a format does not know are skipped, but duplicate keys among them are still refused.
// Feed it every event from the start of the unknown value on, until done().
class UnknownJson {
 public:
  // More keys than this in one object are refused: above what exists, and so few are searched in
  // little memory and time.
  static constexpr std::size_t kMaxKeys = 64;

  // The keys of the object that holds the unknown members; call at its start.
  void reset_siblings() { siblings_.clear(); }
  // False (see status()) for a duplicate or one key too many.
  bool add_sibling(std::string_view key) { return add(siblings_, key); }

  bool key(std::string_view key) { return add(open_[num_open_ - 1], key); }
  bool start_object();
  bool end_object();
  bool start_array();
  bool end_array();
  bool done() const { return depth_ == 0; }

  StatusCode code() const { return code_; }
  const std::string& reason() const { return reason_; }  // without the file's name

 private:
  // The keys of one object: hashes to compare at once, texts to be sure.
  struct Keys {
    std::vector<std::uint64_t> hashes;
    std::vector<std::size_t> ends;  // of each key in `text`
    std::string text;
    void clear();
  };
  bool add(Keys& keys, std::string_view key);
  Keys siblings_;
  std::vector<Keys> open_;  // one per open object; those beyond num_open_ are kept for reuse
  std::size_t num_open_ = 0;
  int depth_ = 0;  // open objects and arrays
  StatusCode code_ = StatusCode::kOk;
  std::string reason_;
};

// The byte position of the first ill-formed UTF-8 sequence (overlong forms, surrogates and values
// above U+10FFFF included), or text.size() when there is none.
std::size_t first_invalid_utf8(std::string_view text);

}  // namespace moesaic::checkpoint
