// How much memory there is for large allocations: an operating system that promises more than it has ends
// the process when the memory is written.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "moesaic/status.h"

namespace moesaic {

// What /proc/meminfo says is there without swapping others out, and the free swap; at most what the
// control group (cgroup 2) leaves. Absent where neither says.
std::optional<std::int64_t> available_memory();
// From the texts of these files, empty where there is none. Of the group: memory.max, memory.current,
// and memory.stat, whose `file` pages are given back.
std::optional<std::int64_t> available_memory(std::string_view meminfo, std::string_view group_max,
                                             std::string_view group_current,
                                             std::string_view group_stat);

// kOutOfMemory for so many bytes, from 1 GiB on, when they are not there.
Status check_available_memory(std::string_view what, std::int64_t bytes);

}  // namespace moesaic
