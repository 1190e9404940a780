// Whether this process may use tile registers (AMX).
#pragma once

#include <string_view>

namespace moesaic::cpu {

// Empty: it may. Else why not. The processor must have AMX_TILE, AMX_BF16 and AMX_INT8; then the
// kernel is asked for the tile data (8 KiB of every thread's saved state), for the whole process and
// once: the answer is kept.
std::string_view amx_refusal();

}  // namespace moesaic::cpu
