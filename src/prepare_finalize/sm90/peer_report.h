// The report that ended a call through peer windows, as a Status.
#pragma once

#include <string_view>

#include "moesaic/status.h"
#include "parallel/peer_control.h"

namespace moesaic::cuda {

// ok while there is none; kDevice, naming all ranks of the report, what was waited for and who says
// so. `report` is written by a GPU: its code is read with acquire, and before the rest.
Status peer_report_status(const parallel::PeerReport* report, std::string_view transport,
                          int timeout_ms);

}  // namespace moesaic::cuda
