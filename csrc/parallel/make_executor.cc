#include "parallel/make_executor.h"

#if defined(__SANITIZE_THREAD__)
#include "parallel/thread_executor.h"
#else
#include "parallel/tbb_executor.h"
#endif

namespace castor {

std::unique_ptr<Executor> make_executor() {
#if defined(__SANITIZE_THREAD__)
  return std::make_unique<ThreadExecutor>();
#else
  return std::make_unique<TbbExecutor>();
#endif
}

}  // namespace castor
