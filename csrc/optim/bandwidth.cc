#include "optim/bandwidth.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/error.h"
#include "optim/dispatch.h"

namespace castor {
namespace {

constexpr std::size_t kTaskElements = 256 * 1024;

struct IncrementLoop {
  float* array;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i)
      array[i] += 1.0f;
  }
};

}  // namespace

double in_place_bandwidth(Executor& executor, std::span<float> array, std::size_t repetitions) {
  if (array.empty() || repetitions == 0) {
    throw InvalidArgument("in_place_bandwidth: needs a non-empty array and at least 1 repetition");
  }
  using Clock = std::chrono::steady_clock;
  const std::size_t num_tasks = (array.size() + kTaskElements - 1) / kTaskElements;
  const auto pass = [&](std::size_t task) {
    const std::size_t begin = task * kTaskElements;
    const std::size_t count = std::min(kTaskElements, array.size() - begin);
    detail::run_on(best_isa(), IncrementLoop{array.data() + begin, count});
  };
  executor.parallel_for(num_tasks, pass);

  std::vector<double> seconds(repetitions);
  for (double& elapsed : seconds) {
    const auto start = Clock::now();
    executor.parallel_for(num_tasks, pass);
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(repetitions / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return static_cast<double>(2 * array.size_bytes()) / *middle;
}

}  // namespace castor
