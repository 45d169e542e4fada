#include "parallel/immediate_copy_engine.h"

#include <cstring>
#include <string>
#include <utility>

#include "core/check_copy.h"
#include "core/error.h"

namespace castor {

ImmediateCopyEngine::ImmediateCopyEngine(Copy copy) : copy_(std::move(copy)) {}

CopyTicket ImmediateCopyEngine::submit(const CopyRequest& request) {
  check_copy(request);
  if (request.await_source) {
    request.await_source();
  }
  if (copy_) {
    copy_(request);
  } else if (!request.source.empty()) {
    std::memcpy(request.target.data(), request.source.data(), request.source.size());
  }
  return CopyTicket{last_ticket_.fetch_add(1, std::memory_order_relaxed) + 1};
}

void ImmediateCopyEngine::wait(CopyTicket ticket) { (void)done(ticket); }

bool ImmediateCopyEngine::done(CopyTicket ticket) {
  const auto number = static_cast<std::uint64_t>(ticket);
  const std::uint64_t last = last_ticket_.load(std::memory_order_relaxed);
  if (number > last) {
    throw InvalidArgument("copy ticket " + std::to_string(number) +
                          " was never given out; the last one is " + std::to_string(last));
  }
  return true;
}

}  // namespace castor
