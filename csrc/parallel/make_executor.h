#pragma once

#include <cstddef>
#include <memory>

#include "core/executor.h"

namespace castor {

/// The executor of a session and of whoever else has no reason for another: TBB's.
/// In a ThreadSanitizer build one of plain threads: what TBB hands from thread to thread, a
/// sanitizer cannot see. `num_threads`: 0 for num_available_cores(). Throws as their constructors.
[[nodiscard]] std::unique_ptr<Executor> make_executor(std::size_t num_threads = 0);

}  // namespace castor
