#pragma once

#include <memory>

#include "core/executor.h"

namespace castor {

/// The executor of a session and of whoever else has no reason for another: TBB's, on every core.
/// In a ThreadSanitizer build one of plain threads: what TBB hands from thread to thread, a
/// sanitizer cannot see. Throws as their constructors.
[[nodiscard]] std::unique_ptr<Executor> make_executor();

}  // namespace castor
