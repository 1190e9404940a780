// A failure cannot be dropped by accident.
// EXPECT: nodiscard|unused-result|unused-value
#include "moesaic/status.h"

moesaic::Status work();

void caller() {
#ifdef CONTROL
  const moesaic::Status status = work();
  static_cast<void>(status);
#else
  work();
#endif
}
