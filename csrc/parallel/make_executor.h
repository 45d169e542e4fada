#pragma once

#include <cstddef>
#include <memory>

#include "core/executor.h"

namespace castor {

/// Makes the executor of a session, and of everything else that has no reason for another: TBB's.
/// In a ThreadSanitizer build it is one of plain threads, because a sanitizer cannot see how TBB
/// hands work from thread to thread. `num_threads` of 0 means num_available_cores(). Throws the
/// exceptions of the executors' constructors.
[[nodiscard]] std::unique_ptr<Executor> make_executor(std::size_t num_threads = 0);

}  // namespace castor
