#include "parallel/parallel_copy_engine.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/check_copy.h"
#include "core/error.h"

namespace castor {

ParallelCopyEngine::ParallelCopyEngine(Executor& executor, std::size_t block_bytes)
    : executor_(executor), block_bytes_(block_bytes) {
  if (block_bytes == 0) {
    throw InvalidArgument("the block of a copy engine has 0 bytes; give 1 or more");
  }
}

CopyTicket ParallelCopyEngine::submit(const CopyRequest& request) {
  check_copy(request);
  if (request.await_source) {
    request.await_source();
  }
  copy(request);
  return CopyTicket{last_ticket_.fetch_add(1, std::memory_order_relaxed) + 1};
}

void ParallelCopyEngine::copy(const CopyRequest& request) const {
  const std::size_t bytes = request.source.size();
  if (bytes == 0) {
    return;
  }
  if (bytes <= block_bytes_ || executor_.num_threads() == 1) {
    std::memcpy(request.target.data(), request.source.data(), bytes);
    return;
  }
  const std::size_t num_blocks = 1 + (bytes - 1) / block_bytes_;
  executor_.parallel_for(num_blocks, [&](std::size_t block) {
    const std::size_t begin = block * block_bytes_;
    std::memcpy(request.target.data() + begin, request.source.data() + begin,
                std::min(block_bytes_, bytes - begin));
  });
}

void ParallelCopyEngine::wait(CopyTicket ticket) { (void)done(ticket); }

bool ParallelCopyEngine::done(CopyTicket ticket) {
  const auto number = static_cast<std::uint64_t>(ticket);
  const std::uint64_t last = last_ticket_.load(std::memory_order_relaxed);
  if (number > last) {
    throw InvalidArgument("copy ticket " + std::to_string(number) +
                          " was never given out; the last one is " + std::to_string(last));
  }
  return true;
}

}  // namespace castor
