#include "optim/average.h"

#include <algorithm>

#include "optim/dispatch.h"
#include "optim/rounding.h"

namespace castor {
namespace {

constexpr std::size_t kBlockElements = 1024;  // whose sum stays in the nearest cache
constexpr std::size_t kElementsPerTask = std::size_t{1} << 16;

template <ScalarType type>
struct BlockMean {
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;

  Storage* mean;
  const Storage* parts;  // the block's first element in the first part
  std::size_t count;
  std::size_t stride;
  std::size_t numel;
  float divisor;

  [[gnu::always_inline]] void operator()() const {
    float sums[kBlockElements];
    for (std::size_t i = 0; i < numel; ++i)
      sums[i] = Codec::load(parts[i]);
    for (std::size_t part = 1; part < count; ++part) {
      const Storage* const values = parts + part * stride;
      for (std::size_t i = 0; i < numel; ++i)
        sums[i] += Codec::load(values[i]);
    }
    for (std::size_t i = 0; i < numel; ++i)
      mean[i] = Codec::round(sums[i] / divisor);
  }
};

template <ScalarType type>
void run(Executor* executor, void* mean, const void* parts, std::size_t count, std::size_t numel,
         float divisor, Isa isa) {
  using Storage = typename ScalarCodec<type>::Storage;
  auto* const out = static_cast<Storage*>(mean);
  const auto* const in = static_cast<const Storage*>(parts);
  const auto do_task = [=](std::size_t task) {
    const std::size_t end = std::min((task + 1) * kElementsPerTask, numel);
    for (std::size_t begin = task * kElementsPerTask; begin < end; begin += kBlockElements) {
      detail::run_as_is_on(isa, BlockMean<type>{.mean = out + begin,
                                                .parts = in + begin,
                                                .count = count,
                                                .stride = numel,
                                                .numel = std::min(kBlockElements, end - begin),
                                                .divisor = divisor});
    }
  };
  const std::size_t num_tasks = (numel + kElementsPerTask - 1) / kElementsPerTask;
  if (executor != nullptr && num_tasks > 1) {
    executor->parallel_for(num_tasks, do_task);
    return;
  }
  for (std::size_t task = 0; task < num_tasks; ++task) {
    do_task(task);
  }
}

}  // namespace

void detail::average(Executor* executor, void* mean, const void* parts, std::size_t count,
                     std::size_t numel, float divisor, ScalarType type, Isa isa) {
  switch (type) {
    case ScalarType::kFloat32:
      run<ScalarType::kFloat32>(executor, mean, parts, count, numel, divisor, isa);
      return;
    case ScalarType::kBFloat16:
      run<ScalarType::kBFloat16>(executor, mean, parts, count, numel, divisor, isa);
      return;
    case ScalarType::kFloat16:
      run<ScalarType::kFloat16>(executor, mean, parts, count, numel, divisor, isa);
      return;
    case ScalarType::kUInt8: throw_no_arithmetic(type);
  }
}

void average(Executor* executor, void* mean, const void* parts, std::size_t count,
             std::size_t numel, ScalarType type) {
  detail::average(executor, mean, parts, count, numel, static_cast<float>(count), type, best_isa());
}

void sum(void* total, const void* parts, std::size_t count, std::size_t numel, ScalarType type) {
  detail::average(nullptr, total, parts, count, numel, 1.0F, type, best_isa());
}

}  // namespace castor
