#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "core/copy_engine.h"

namespace castor {

/// Copy engine of the CPU "device" at memory speed. submit() copies on the calling thread, and
/// returns when the copy is complete. So every ticket is done when the caller gets it, and wait()
/// never blocks; await_source runs inside submit().
///
/// Thread-safe; tickets grow over both directions together.
class ImmediateCopyEngine final : public CopyEngine {
 public:
  /// Function that copies request.source to request.target; may throw. Called by several threads at
  /// once.
  using Copy = std::function<void(const CopyRequest& request)>;

  /// `copy`: memcpy by default.
  explicit ImmediateCopyEngine(Copy copy = {});

  /// Throws InvalidArgument if the spans differ in size or overlap.
  [[nodiscard]] CopyTicket submit(const CopyRequest& request) override;
  /// Throws InvalidArgument for a ticket that was never given out; so does done().
  void wait(CopyTicket ticket) override;
  [[nodiscard]] bool done(CopyTicket ticket) override;
  [[nodiscard]] bool asynchronous() const noexcept override { return false; }

 private:
  const Copy copy_;
  // Relaxed: a ticket is given out after its copy, on the thread that made it; whoever passes the
  // ticket on to another thread synchronises the two.
  std::atomic<std::uint64_t> last_ticket_{0};
};

}  // namespace castor
