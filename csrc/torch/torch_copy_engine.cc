#include "torch/torch_copy_engine.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_ops.h>

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
  if (const std::size_t bytes = request.source.size(); bytes > 0) {
    // Straight to the kernel of the CPU, below all that a user may have put between.
    at::Tensor target = bytes_at(request.target.data(), bytes, c10::kCPU);
    at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), target,
                                bytes_at(request.source.data(), bytes, c10::kCPU),
                                /*non_blocking=*/false);
  }
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
