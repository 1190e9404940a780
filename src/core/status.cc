#include "moesaic/status.h"

namespace moesaic {

std::string_view status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid_argument";
    case StatusCode::kInvalidShape:
      return "invalid_shape";
    case StatusCode::kInvalidLayout:
      return "invalid_layout";
    case StatusCode::kInvalidDType:
      return "invalid_dtype";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kAmbiguousFormat:
      return "ambiguous_format";
    case StatusCode::kCorruptFile:
      return "corrupt_file";
    case StatusCode::kMissingTensor:
      return "missing_tensor";
    case StatusCode::kNotFound:
      return "not_found";
    case StatusCode::kIo:
      return "io";
    case StatusCode::kLimitExceeded:
      return "limit_exceeded";
    case StatusCode::kAliasing:
      return "aliasing";
    case StatusCode::kWorkspaceTooSmall:
      return "workspace_too_small";
    case StatusCode::kOutOfMemory:
      return "out_of_memory";
    case StatusCode::kDevice:
      return "device";
    case StatusCode::kInternal:
      return "internal";
  }
  return "unknown";
}

std::string Status::to_string() const {
  if (ok()) return "ok";
  std::string text(status_code_name(code_));
  text += ": ";
  text += message_;
  return text;
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  std::string text(context);
  text += ": ";
  if (message_.starts_with(text)) return *this;  // a path that was named already
  text += message_;
  return Status(code_, std::move(text));
}

}  // namespace moesaic
