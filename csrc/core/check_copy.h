#pragma once

#include "core/copy_engine.h"

namespace castor {

/// Throws InvalidArgument if the spans of a request differ in size or overlap.
void check_copy(const CopyRequest& request);

}  // namespace castor
