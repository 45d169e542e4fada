#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/copy_engine.h"

namespace castor {

/// Copy engine of the CPU "device" at memory speed. submit() copies on the calling thread and
/// torch's intra-op threads and returns when the copy is complete. So every ticket is done when the
/// caller gets it, and wait() never blocks; await_source runs inside submit().
///
/// The engine uses torch's threads because they spin for a while after each operator: threads of
/// anybody else would wait for the cores that these hold. torch.set_num_threads() bounds a copy as
/// it bounds an operator. No autograd graph, dispatch mode or profiler sees a copy.
///
/// Thread-safe; tickets grow over both directions together.
class TorchCopyEngine final : public CopyEngine {
 public:
  /// Throws InvalidArgument if the spans differ in size or overlap.
  [[nodiscard]] CopyTicket submit(const CopyRequest& request) override;
  /// Throws InvalidArgument for a ticket that was never given out; so does done().
  void wait(CopyTicket ticket) override;
  [[nodiscard]] bool done(CopyTicket ticket) override;
  [[nodiscard]] bool asynchronous() const noexcept override { return false; }

 private:
  // Relaxed: a ticket is given out after its copy, on the thread that made it; whoever passes the
  // ticket on to another thread synchronises the two.
  std::atomic<std::uint64_t> last_ticket_{0};
};

}  // namespace castor
