// Bar charts for a terminal.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace moesaic::tool {

// Columns of block characters, `height` lines high, one column per value, with a line of numbers
// (0, 1, 2 ...) below. More values than fit 72 columns are folded: neighbours share a column that
// shows their mean. The first line begins with `label`, the others with as much space.
std::string column_chart(std::span<const std::int64_t> values, int height,
                         const std::string& label);

}  // namespace moesaic::tool
