#pragma once

// Internal to csrc/optim.

#include <algorithm>
#include <cstddef>

#include "core/executor.h"

namespace castor::detail {

/// Number of elements of an array that one task converts; a multiple of kMomentBlock.
inline constexpr std::size_t kConvertTaskElements = 64 * 1024;

/// Calls body(begin, count) for pieces of [0, numel). Runs on the calling thread if `executor` is
/// null or there is only one piece.
template <typename Body>
void for_each_task(Executor* executor, std::size_t numel, const Body& body) {
  const std::size_t num_tasks = (numel + kConvertTaskElements - 1) / kConvertTaskElements;
  const auto run = [&](std::size_t task) {
    const std::size_t begin = task * kConvertTaskElements;
    body(begin, std::min(kConvertTaskElements, numel - begin));
  };
  if (executor != nullptr && num_tasks > 1) {
    executor->parallel_for(num_tasks, run);
  } else {
    for (std::size_t task = 0; task < num_tasks; ++task)
      run(task);
  }
}

}  // namespace castor::detail
