#include "torch/torch_copy_engine.h"

#include <string>

#include "core/check_copy.h"
#include "core/error.h"
#include "torch/chunk_storages.h"

namespace castor {

CopyTicket TorchCopyEngine::submit(const CopyRequest& request) {
  check_copy(request);
  if (request.await_source) {
    request.await_source();
  }
  copy_on_cpu(request.source, request.target.data());
  return CopyTicket{last_ticket_.fetch_add(1, std::memory_order_relaxed) + 1};
}

void TorchCopyEngine::wait(CopyTicket ticket) { (void)done(ticket); }

bool TorchCopyEngine::done(CopyTicket ticket) {
  const auto number = static_cast<std::uint64_t>(ticket);
  const std::uint64_t last = last_ticket_.load(std::memory_order_relaxed);
  if (number > last) {
    throw InvalidArgument("copy ticket " + std::to_string(number) +
                          " was never given out; the last one is " + std::to_string(last));
  }
  return true;
}

}  // namespace castor
