// Warnings of the library. The library never prints: without a sink they are dropped.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace moesaic {

using LogSink = std::function<void(std::string_view message)>;

// Installs the process-wide sink (empty: none) and forgets which warnings were already given. What
// the sink throws is dropped, and that warning with it. Thread-safe.
void set_log_sink(LogSink sink);
// Passes `message` to the sink unless the same text was passed before. Thread-safe; keeps at
// most 4096 texts.
void log_warning_once(const std::string& message);

}  // namespace moesaic
