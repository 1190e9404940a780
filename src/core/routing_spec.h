// The routing of a layer by itself, without the sizes around it.
#pragma once

#include "moesaic/spec.h"
#include "moesaic/status.h"

namespace moesaic {

// Every rule for a RoutingSpec that holds for a layer and for a Router alike. kInvalidArgument or
// kLimitExceeded, by the field's name.
Status validate_routing(const RoutingSpec& routing);

}  // namespace moesaic
