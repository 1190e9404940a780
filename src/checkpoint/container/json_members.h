// What the readers of one large JSON object share: they walk over members that the format does not
// know, and refuse a value where another is needed with a text that names what was found.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "checkpoint/container/json_strict.h"
#include "checkpoint/container/names.h"

namespace moesaic::checkpoint {

// A reader overrides the events below for the values it takes, and calls unexpected() (or the
// overridden event) for all others. It sees nothing of the values that it skips.
class JsonMembers : public JsonEvents {
 public:
  explicit JsonMembers(std::string_view label) : label_(label) {}

  bool on_null() final { return other_scalar("null"); }
  bool on_bool(bool value) final { return other_scalar(value ? "true" : "false"); }
  bool on_unsigned(std::uint64_t value) final { return skips_scalar() || take_unsigned(value); }
  bool on_negative(std::int64_t value) final {
    return skips_scalar() || unexpected(value == 0 ? "-0" : fmt::format("{}", value));
  }
  bool on_real(double value, std::string_view literal) final {
    return skips_scalar() || take_real(value, literal);
  }
  bool on_string(std::string_view value) final { return skips_scalar() || take_string(value); }
  bool on_key(std::string_view key) final {
    return skipping_ ? unknown_.key(key) || fail_unknown() : take_key(key);
  }
  bool on_start_object() final { return skipping_ ? unknown_.start_object() : start_object(); }
  bool on_end_object() final {
    if (!skipping_) return end_object();
    unknown_.end_object();
    return leave();
  }
  bool on_start_array() final { return skipping_ ? unknown_.start_array() : start_array(); }
  bool on_end_array() final {
    if (!skipping_) return end_array();
    unknown_.end_array();
    return leave();
  }

  const Status& status() const { return status_; }

 protected:
  // All return false to stop, with the reason in status().
  virtual bool take_unsigned(std::uint64_t value) { return unexpected(fmt::format("{}", value)); }
  virtual bool take_real(double, std::string_view literal) {
    return unexpected(fmt::format("{}{}", literal.substr(0, 40), literal.size() > 40 ? "..." : ""));
  }
  virtual bool take_string(std::string_view value) {
    return unexpected("string " + quote_name(value));
  }
  virtual bool take_key(std::string_view key) = 0;
  virtual bool start_object() = 0;
  virtual bool end_object() = 0;
  virtual bool start_array() { return unexpected("an array"); }
  virtual bool end_array() { return true; }
  // Refuses `found` ("null", "7", "an array") in the place where something else must be.
  virtual bool unexpected(std::string_view found) = 0;
  // A key of a skipped value stands twice, or there are too many.
  virtual bool fail_unknown() { return fail(unknown_.code(), unknown_.reason()); }

  bool fail(StatusCode code, std::string_view text) {
    status_ = Status(code, fmt::format("{}: {}", label_, text));
    return false;
  }
  // The value of the key that was just read is not the format's.
  void skip_value() { skipping_ = true; }

  std::string_view label_;
  Status status_;
  UnknownJson unknown_;

 private:
  bool leave() {
    if (unknown_.done()) skipping_ = false;
    return true;
  }
  // Is the scalar part of a value that is skipped?
  bool skips_scalar() { return skipping_ && leave(); }
  bool other_scalar(std::string_view found) { return skips_scalar() || unexpected(found); }

  bool skipping_ = false;
};

}  // namespace moesaic::checkpoint
