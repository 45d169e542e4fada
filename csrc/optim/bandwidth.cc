#include "optim/bandwidth.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "core/error.h"
#include "optim/adam_rule.h"
#include "optim/dispatch.h"
#include "optim/update_rule.h"

namespace castor {
namespace {

constexpr std::size_t kTaskElements = 256 * 1024;
constexpr std::size_t kAdamArrays = 4;  // weight, gradient, two moments
constexpr std::size_t kAdamBytes = 28;

struct IncrementLoop {
  float* array;
  std::size_t count;

  [[gnu::always_inline]] void operator()() const {
    for (std::size_t i = 0; i < count; ++i)
      array[i] += 1.0f;
  }
};

}  // namespace

double median_seconds(const std::function<void()>& pass, std::size_t repetitions) {
  using Clock = std::chrono::steady_clock;
  pass();
  std::vector<double> seconds(repetitions);
  for (double& elapsed : seconds) {
    const auto start = Clock::now();
    pass();
    elapsed = std::chrono::duration<double>(Clock::now() - start).count();
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(repetitions / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

double in_place_bandwidth(Executor& executor, std::span<float> array, std::size_t repetitions) {
  if (array.empty() || repetitions == 0) {
    throw InvalidArgument("in_place_bandwidth: needs a non-empty array and at least 1 repetition");
  }
  const std::size_t num_tasks = (array.size() + kTaskElements - 1) / kTaskElements;
  const auto increment = [&](std::size_t task) {
    const std::size_t begin = task * kTaskElements;
    const std::size_t count = std::min(kTaskElements, array.size() - begin);
    detail::run_on(best_isa(), IncrementLoop{array.data() + begin, count});
  };
  const double seconds =
      median_seconds([&] { executor.parallel_for(num_tasks, increment); }, repetitions);
  return static_cast<double>(2 * array.size_bytes()) / seconds;
}

double adam_bandwidth(Executor& executor, std::span<float> arrays, std::size_t repetitions) {
  const std::size_t numel = arrays.size() / kAdamArrays;
  if (numel == 0 || repetitions == 0) {
    throw InvalidArgument("adam_bandwidth: needs at least 4 elements and at least 1 repetition");
  }
  const std::unique_ptr<UpdateRule> rule = make_update_rule(AdamRule::kName, StateFormat::kFp32);
  RuleOptions options{};
  options[0] = 1e-3;  // lr
  options[1] = 0.9;
  options[2] = 0.999;
  options[3] = 1e-8;                // eps
  std::ranges::fill(arrays, 1.0f);  // moments and gradient are no denormals, which are slow
  const UpdateSegment segment{
      .param = arrays.data(),
      .grad = arrays.data() + numel,
      .states = {arrays.data() + 2 * numel, arrays.data() + 3 * numel},
      .numel = numel,
      .coefficients = rule->coefficients(options, 1, 1.0),
  };
  const double seconds =
      median_seconds([&] { rule->update(executor, std::span(&segment, 1)); }, repetitions);
  return static_cast<double>(kAdamBytes * numel) / seconds;
}

}  // namespace castor
