// Whether this process may use tile registers (AMX).
#pragma once

#include <string_view>

namespace moesaic::cpu {

// Empty: it may. Else why not. The processor must have AMX_TILE, AMX_BF16 and AMX_INT8; then the
// kernel is asked for the tile data (8 KiB of every thread's saved state), for the whole process and
// once: the answer is kept.
std::string_view amx_refusal();

// What there was to ask, and what becomes of it.
struct AmxMachine {
  bool has_tiles = false;    // the processor
  bool saves_tiles = false;  // the system, for the threads that it switches between
  // errno of the request; 0: granted. An alternative signal stack that is too small for the larger
  // state is the usual cause of another one than those that are named.
  int request_error = 0;
};
std::string_view amx_refusal(const AmxMachine& machine);

}  // namespace moesaic::cpu
