#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/copy_engine.h"
#include "core/executor.h"
#include "core/units.h"

namespace castor {

/// The copy engine of the CPU "device": submit() copies on the threads of an Executor and returns
/// when the copy is complete, so every ticket is done when the caller gets it and wait() never
/// blocks; await_source runs inside submit(). Copies of at most one block run on the calling
/// thread.
///
/// Borrows the executor, which must outlive it; must not be called from the executor's bodies.
/// Thread-safe; tickets grow over both directions together.
class ParallelCopyEngine final : public CopyEngine {
 public:
  /// Smaller blocks cost more hand-outs, larger ones balance worse.
  static constexpr std::size_t kDefaultBlockBytes = kMiB;

  /// Throws InvalidArgument if `block_bytes` is 0.
  explicit ParallelCopyEngine(Executor& executor, std::size_t block_bytes = kDefaultBlockBytes);

  /// Throws InvalidArgument if the spans differ in size or overlap.
  [[nodiscard]] CopyTicket submit(const CopyRequest& request) override;
  /// Throws InvalidArgument for a ticket that was never given out; so does done().
  void wait(CopyTicket ticket) override;
  [[nodiscard]] bool asynchronous() const noexcept override { return false; }
  [[nodiscard]] bool done(CopyTicket ticket) override;

 private:
  void copy(const CopyRequest& request) const;

  Executor& executor_;
  const std::size_t block_bytes_;
  // Relaxed: a ticket is given out after its copy, on the thread that made it; whoever passes the
  // ticket on to another thread synchronises the two.
  std::atomic<std::uint64_t> last_ticket_{0};
};

}  // namespace castor
