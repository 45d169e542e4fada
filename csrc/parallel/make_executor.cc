#include "parallel/make_executor.h"

#include "parallel/cores.h"

#if defined(__SANITIZE_THREAD__)
#include "parallel/thread_executor.h"
#else
#include "parallel/tbb_executor.h"
#endif

namespace castor {

std::unique_ptr<Executor> make_executor(std::size_t num_threads) {
  const std::size_t threads = num_threads == 0 ? num_available_cores() : num_threads;
#if defined(__SANITIZE_THREAD__)
  return std::make_unique<ThreadExecutor>(threads);
#else
  return std::make_unique<TbbExecutor>(threads);
#endif
}

}  // namespace castor
