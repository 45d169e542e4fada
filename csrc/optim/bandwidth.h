#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "core/executor.h"

namespace castor {

/// Returns the median of the seconds that `pass` takes in `repetitions` runs, at least 1, after one
/// that is not counted.
[[nodiscard]] double median_seconds(const std::function<void()>& pass, std::size_t repetitions);

/// Measures the bandwidth, in bytes per second, of the in-place stream `a[i] += 1`, reads and
/// writes counted (8 bytes per element). A state update bound by memory can reach no more here.
/// Runs `repetitions` passes over `array`, after one that is not counted, and returns the median.
/// For DRAM, `array` must be much larger than the last-level cache. Throws InvalidArgument for an
/// empty array or no repetition.
[[nodiscard]] double in_place_bandwidth(Executor& executor, std::span<float> array,
                                        std::size_t repetitions);

/// Measures the bandwidth, in bytes per second, of fp32 Adam on the host: 28 bytes per element, of
/// which weight and moments are read and written, and the gradient is read. `arrays` is cut into
/// these four. Repeats and throws as in_place_bandwidth().
[[nodiscard]] double adam_bandwidth(Executor& executor, std::span<float> arrays,
                                    std::size_t repetitions);

}  // namespace castor
