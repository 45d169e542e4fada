#include "optim/gradient.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "optim/dispatch.h"
#include "optim/rounding.h"

namespace castor {
namespace {

constexpr std::size_t kLanes = kNormLanes;

/// Also the unit of the copy: at most 16 KiB, so that the second read is served by the cache.
constexpr std::size_t kBlockElements = kNormBlock;

/// What a task does: 256 KiB of fp32.
constexpr std::size_t kBlocksPerTask = 16;

[[gnu::always_inline]] inline double sum_of(double (&lanes)[kLanes]) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i)
      lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

/// Calls work(block) for each, in tasks where there is an executor and more than one.
template <typename Work>
void for_each_block(Executor* executor, std::size_t num_blocks, const Work& work) {
  const std::size_t num_tasks = (num_blocks + kBlocksPerTask - 1) / kBlocksPerTask;
  const auto do_task = [&](std::size_t task) {
    const std::size_t end = std::min((task + 1) * kBlocksPerTask, num_blocks);
    for (std::size_t block = task * kBlocksPerTask; block < end; ++block)
      work(block);
  };
  if (executor == nullptr || num_tasks <= 1) {
    for (std::size_t task = 0; task < num_tasks; ++task)
      do_task(task);
    return;
  }
  executor->parallel_for(num_tasks, do_task);
}

template <ScalarType type>
struct BlockSquares {
  using Codec = ScalarCodec<type>;
  using Storage = typename Codec::Storage;

  const Storage* src;
  std::size_t count;
  double (&lanes)[kLanes];

  [[gnu::always_inline]] void operator()() const {
    const std::size_t whole = count / kLanes * kLanes;
    for (std::size_t i = 0; i < whole; i += kLanes)
      add_squares(lanes, src + i);
    if (whole < count) {
      Storage last[kLanes] = {};  // a zero changes no sum
      for (std::size_t i = whole; i < count; ++i)
        last[i - whole] = src[i];
      add_squares(lanes, last);
    }
  }

  [[gnu::always_inline]] static inline void add_squares(double (&lanes)[kLanes],
                                                        const Storage* values) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = Codec::load(values[lane]);
      lanes[lane] += value * value;
    }
  }
};

template <ScalarType type>
struct BlockNorm {
  using Storage = typename ScalarCodec<type>::Storage;

  const Storage* src;
  std::size_t count;
  double* result;

  [[gnu::always_inline]] void operator()() const {
    double lanes[kLanes] = {};
    BlockSquares<type>{src, count, lanes}();
    *result = sum_of(lanes);
  }
};

template <ScalarType type>
double run(Executor* executor, void* dst, const void* src, std::size_t numel, Isa isa) {
  using Storage = typename ScalarCodec<type>::Storage;
  const auto* const in = static_cast<const Storage*>(src);
  auto* const out = dst == src ? nullptr : static_cast<Storage*>(dst);
  const std::size_t num_blocks = (numel + kBlockElements - 1) / kBlockElements;

  const auto do_block = [=](std::size_t block) {
    const std::size_t begin = block * kBlockElements;
    const std::size_t count = std::min(kBlockElements, numel - begin);
    double sum = 0.0;
    detail::run_on(isa, BlockNorm<type>{in + begin, count, &sum});
    if (out != nullptr)
      std::memcpy(out + begin, in + begin, count * sizeof(Storage));
    return sum;
  };

  double total = 0.0;
  if (executor == nullptr || num_blocks <= kBlocksPerTask) {
    for_each_block(nullptr, num_blocks, [&](std::size_t block) { total += do_block(block); });
    return total;
  }
  std::vector<double> sums(num_blocks);
  for_each_block(executor, num_blocks, [&](std::size_t block) { sums[block] = do_block(block); });
  for (const double sum : sums)
    total += sum;
  return total;
}

}  // namespace

double detail::copy_and_square_norm(Executor* executor, void* dst, const void* src,
                                    std::size_t numel, ScalarType type, Isa isa) {
  switch (type) {
    case ScalarType::kFloat32: return run<ScalarType::kFloat32>(executor, dst, src, numel, isa);
    case ScalarType::kBFloat16: return run<ScalarType::kBFloat16>(executor, dst, src, numel, isa);
    case ScalarType::kFloat16: return run<ScalarType::kFloat16>(executor, dst, src, numel, isa);
    case ScalarType::kUInt8: throw_no_arithmetic(type);
  }
  return 0.0;
}

void square_norms_of_blocks(Executor* executor, const void* src, std::size_t numel, ScalarType type,
                            std::span<double> sums) {
  const auto* const bytes = static_cast<const std::byte*>(src);
  for_each_block(executor, sums.size(), [&](std::size_t block) {
    const std::size_t begin = block * kBlockElements;
    sums[block] = copy_and_square_norm(nullptr, nullptr, bytes + begin * size_of(type),
                                       std::min(kBlockElements, numel - begin), type);
  });
}

void add_squares(std::span<double, kNormLanes> lanes, const void* src, std::size_t numel,
                 ScalarType type) {
  double sums[kLanes];
  std::copy(lanes.begin(), lanes.end(), sums);
  const auto add = [&]<ScalarType kType>() {
    using Storage = typename ScalarCodec<kType>::Storage;
    detail::run_on(best_isa(), BlockSquares<kType>{static_cast<const Storage*>(src), numel, sums});
  };
  switch (type) {
    case ScalarType::kFloat32: add.template operator()<ScalarType::kFloat32>(); break;
    case ScalarType::kBFloat16: add.template operator()<ScalarType::kBFloat16>(); break;
    case ScalarType::kFloat16: add.template operator()<ScalarType::kFloat16>(); break;
    case ScalarType::kUInt8: throw_no_arithmetic(type);
  }
  std::copy(std::begin(sums), std::end(sums), lanes.begin());
}

double sum_of_lanes(std::span<const double, kNormLanes> lanes) {
  double sums[kLanes];
  std::copy(lanes.begin(), lanes.end(), sums);
  return sum_of(sums);
}

double copy_and_square_norm(Executor* executor, void* dst, const void* src, std::size_t numel,
                            ScalarType type) {
  return detail::copy_and_square_norm(executor, dst, src, numel, type, best_isa());
}

}  // namespace castor
