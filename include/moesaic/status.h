// Status and Result: how every function of the library reports failure. Nothing here throws.
#pragma once

#include <cassert>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace moesaic {

// What went wrong, coarse enough to branch on. The text of a Status has the field, the value found
// and the value needed.
enum class StatusCode {
  kOk = 0,
  kInvalidArgument,    // a value outside its documented range (top_k > E, a negative size ...)
  kInvalidShape,       // a tensor's rank or dimensions
  kInvalidLayout,      // strides, alignment, arrangement
  kInvalidDType,       // an element type that the call does not take
  kUnsupported,        // meaningful, but not implemented by what was asked to do it
  kAmbiguousFormat,    // the input admits two readings and nothing says which is meant
  kCorruptFile,        // a file contradicts its format or itself
  kMissingTensor,      // a checkpoint lacks tensors that its configuration promises
  kNotFound,           // no such file, layer, tensor or backend
  kIo,                 // the operating system refused
  kLimitExceeded,      // a documented cap or a 64-bit size was exceeded
  kAliasing,           // buffers overlap that must not
  kWorkspaceTooSmall,  // names bytes given and needed
  kOutOfMemory,
  kDevice,    // accelerator or communicator
  kInternal,  // our own invariant failed; always a bug
};

// "kInvalidShape" -> "invalid_shape": the stable name printed by the tool and asserted by tests.
std::string_view status_code_name(StatusCode code);

// Success, or a code with a text for people. Cheap to copy when ok.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // "invalid_shape: w2_scale: got [8, 7, 14], need [8, 8, 14] ..." or "ok".
  std::string to_string() const;

  // The same failure with "context: " in front of its text; ok stays ok.
  Status with_context(std::string_view context) const;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value or the Status that explains its absence; one made of an ok Status has neither and is
// kInternal. Reading value() of a failed Result is a caller's bug (asserted).
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  // An ok status is not asserted away: it may come from a caller's ExpertSource or PrepareAndFinalize.
  Result(Status status)  // NOLINT(google-explicit-constructor)
      : status_(status.ok() ? Status(StatusCode::kInternal, "got a result without value or failure")
                            : std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    assert(ok());
    return *value_;
  }
  const T& value() const& {
    assert(ok());
    return *value_;
  }
  T&& value() && {
    assert(ok());
    return *std::move(value_);
  }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace moesaic

// Returns from the enclosing function when `expr` (a Status) failed.
#define MOESAIC_RETURN_IF_ERROR(expr)                  \
  do {                                                 \
    ::moesaic::Status moesaic_status_ = (expr);        \
    if (!moesaic_status_.ok()) return moesaic_status_; \
  } while (false)

#define MOESAIC_CONCAT_INNER_(a, b) a##b
#define MOESAIC_CONCAT_(a, b) MOESAIC_CONCAT_INNER_(a, b)
// MOESAIC_ASSIGN_OR_RETURN(auto x, make_x()): unwraps a Result or returns its Status.
#define MOESAIC_ASSIGN_OR_RETURN(decl, expr) \
  MOESAIC_ASSIGN_OR_RETURN_IMPL_(MOESAIC_CONCAT_(moesaic_result_, __LINE__), decl, expr)
#define MOESAIC_ASSIGN_OR_RETURN_IMPL_(tmp, decl, expr) \
  auto tmp = (expr);                                    \
  if (!tmp.ok()) return tmp.status();                   \
  decl = std::move(tmp).value()
