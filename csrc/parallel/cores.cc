#include "parallel/cores.h"

#include <sched.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "core/error.h"

namespace castor {

std::size_t num_available_cores() {
  struct Free {
    void operator()(cpu_set_t* set) const noexcept { CPU_FREE(set); }
  };
  constexpr int kLargestMachine = 1 << 20;
  // The kernel answers EINVAL while the mask is smaller than its own.
  for (int num_cpus = CPU_SETSIZE; num_cpus <= kLargestMachine; num_cpus *= 2) {
    const std::unique_ptr<cpu_set_t, Free> set(CPU_ALLOC(num_cpus));
    if (set == nullptr) {
      throw std::bad_alloc();
    }
    const std::size_t bytes = CPU_ALLOC_SIZE(num_cpus);
    if (::sched_getaffinity(0, bytes, set.get()) == 0) {
      return static_cast<std::size_t>(CPU_COUNT_S(bytes, set.get()));
    }
    if (errno != EINVAL) {
      break;
    }
  }
  throw Error("sched_getaffinity failed: " + std::generic_category().message(errno) +
              ". Give the number of threads explicitly");
}

}  // namespace castor
