#include "parallel/tbb_executor.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#include <tbb/task_arena.h>

#include <limits>
#include <optional>
#include <string>

#include "core/error.h"
#include "parallel/cores.h"

namespace castor {
namespace {

std::size_t checked_num_threads(std::size_t num_threads) {
  if (num_threads == 0 || num_threads > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    throw InvalidArgument("an executor cannot have " + std::to_string(num_threads) +
                          " threads; give 1 or more");
  }
  return num_threads;
}

}  // namespace

struct TbbExecutor::Tbb {
  explicit Tbb(std::size_t num_threads) : arena(static_cast<int>(num_threads)) {
    if (static_cast<int>(num_threads) > tbb::info::default_concurrency()) {
      limit.emplace(tbb::global_control::max_allowed_parallelism, num_threads);
    }
  }

  std::optional<tbb::global_control> limit;
  tbb::task_arena arena;
};

TbbExecutor::TbbExecutor() : TbbExecutor(num_available_cores()) {}

TbbExecutor::TbbExecutor(std::size_t num_threads)
    : num_threads_(checked_num_threads(num_threads)), tbb_(std::make_unique<Tbb>(num_threads)) {}

TbbExecutor::~TbbExecutor() = default;

void TbbExecutor::parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) {
  if (count == 0) {
    return;
  }
  tbb_->arena.execute([&] {
    tbb::this_task_arena::isolate([&] {
      // Bodies are blocks of work already, so every one may be stolen: no chunking by TBB.
      tbb::parallel_for(std::size_t{0}, count, body, tbb::simple_partitioner());
    });
  });
}

}  // namespace castor
