// Time-outs of tests that are not about time-outs.
#pragma once

namespace moesaic::test {

// Against hangs only: no verdict depends on it, on however slow or busy a machine.
inline constexpr int kHangGuardMs = 600'000;

}  // namespace moesaic::test
