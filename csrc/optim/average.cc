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

  const Storage* parts;  // the block's first element in the first part
  std::size_t count;
  std::size_t stride;
  std::size_t numel;
  const float* before;
  float* total;
  Storage* mean;
  float divisor;
  detail::Ties ties;

  [[gnu::always_inline]] void operator()() const {
    float sums[kBlockElements];
    if (before != nullptr) {
      for (std::size_t i = 0; i < numel; ++i)
        sums[i] = before[i] + Codec::load(parts[i]);
    } else {
      for (std::size_t i = 0; i < numel; ++i)
        sums[i] = Codec::load(parts[i]);
    }
    for (std::size_t part = 1; part < count; ++part) {
      const Storage* const values = parts + part * stride;
      for (std::size_t i = 0; i < numel; ++i)
        sums[i] += Codec::load(values[i]);
    }
    if (total != nullptr) {
      for (std::size_t i = 0; i < numel; ++i)
        total[i] = sums[i];
      return;
    }
    if constexpr (type == ScalarType::kBFloat16) {
      if (ties == detail::Ties::kToEven) {
        for (std::size_t i = 0; i < numel; ++i)
          mean[i] = round_to_even_bfloat16(sums[i] / divisor);
        return;
      }
    }
    for (std::size_t i = 0; i < numel; ++i)
      mean[i] = Codec::round(sums[i] / divisor);
  }
};

template <typename T>
T* from(T* first, std::size_t begin) {
  return first == nullptr ? nullptr : first + begin;
}

template <ScalarType type>
void run(Executor* executor, const detail::PartSums& work, Isa isa) {
  using Storage = typename ScalarCodec<type>::Storage;
  const auto do_task = [=](std::size_t task) {
    const std::size_t end = std::min((task + 1) * kElementsPerTask, work.numel);
    for (std::size_t begin = task * kElementsPerTask; begin < end; begin += kBlockElements) {
      detail::run_as_is_on(isa,
                           BlockMean<type>{.parts = static_cast<const Storage*>(work.parts) + begin,
                                           .count = work.count,
                                           .stride = work.numel,
                                           .numel = std::min(kBlockElements, end - begin),
                                           .before = from(work.before, begin),
                                           .total = from(work.sums, begin),
                                           .mean = from(static_cast<Storage*>(work.mean), begin),
                                           .divisor = work.divisor,
                                           .ties = work.ties});
    }
  };
  const std::size_t num_tasks = (work.numel + kElementsPerTask - 1) / kElementsPerTask;
  if (executor != nullptr && num_tasks > 1) {
    executor->parallel_for(num_tasks, do_task);
    return;
  }
  for (std::size_t task = 0; task < num_tasks; ++task) {
    do_task(task);
  }
}

}  // namespace

void detail::average(Executor* executor, const PartSums& work, Isa isa) {
  switch (work.type) {
    case ScalarType::kFloat32: run<ScalarType::kFloat32>(executor, work, isa); return;
    case ScalarType::kBFloat16: run<ScalarType::kBFloat16>(executor, work, isa); return;
    case ScalarType::kFloat16: run<ScalarType::kFloat16>(executor, work, isa); return;
    case ScalarType::kUInt8: throw_no_arithmetic(work.type);
  }
}

void average(Executor* executor, void* mean, const void* parts, std::size_t count,
             std::size_t numel, ScalarType type) {
  average_last(executor, mean, nullptr, parts, count, count, numel, type);
}

void add_up(Executor* executor, float* sums, bool begun, const void* parts, std::size_t count,
            std::size_t numel, ScalarType type) {
  detail::average(executor,
                  {.parts = parts,
                   .count = count,
                   .numel = numel,
                   .type = type,
                   .before = begun ? sums : nullptr,
                   .sums = sums},
                  best_isa());
}

void average_last(Executor* executor, void* mean, const float* sums, const void* parts,
                  std::size_t count, std::size_t total, std::size_t numel, ScalarType type) {
  detail::average(executor,
                  {.parts = parts,
                   .count = count,
                   .numel = numel,
                   .type = type,
                   .before = sums,
                   .mean = mean,
                   .divisor = static_cast<float>(total)},
                  best_isa());
}

void sum(void* total, const void* parts, std::size_t count, std::size_t numel, ScalarType type) {
  detail::average(nullptr,
                  {.parts = parts,
                   .count = count,
                   .numel = numel,
                   .type = type,
                   .mean = total,
                   .ties = detail::Ties::kToEven},
                  best_isa());
}

}  // namespace castor
