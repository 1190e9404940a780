// The two commonest refusals.
#pragma once

#include <string>
#include <utility>

#include "moesaic/status.h"

namespace moesaic {

inline Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }
inline Status unsupported(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }

}  // namespace moesaic
