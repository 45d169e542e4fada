#pragma once

#include "core/executor.h"

namespace castor {

/// Returns the executor of every standalone HybridAdam of the process. Internal to csrc/python.
[[nodiscard]] Executor& shared_executor();

}  // namespace castor
