#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace castor {

enum class CopyDirection { kHostToDevice, kDeviceToHost };

/// One copy between non-overlapping buffers of equal size.
struct CopyRequest {
  std::span<const std::byte> source;
  std::span<std::byte> target;
  CopyDirection direction = CopyDirection::kHostToDevice;
  /// Called before the source is read, where something still writes it: returns when that is done,
  /// and what it throws is the copy's failure. Empty: the source is ready.
  std::function<void()> await_source;
};

/// Names a submitted copy; grows with each submission of a direction. 0 names "nothing to wait
/// for".
enum class CopyTicket : std::uint64_t { kNone = 0 };

/// Seam for moving chunk payloads between device and host. Copies of one direction complete in the
/// order of submission. The caller keeps both buffers alive until the ticket is done.
/// Destruction waits for every copy in flight. Thread-safe.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  [[nodiscard]] virtual CopyTicket submit(const CopyRequest& request) = 0;
  /// Returns when the copy is visible to the compute work that follows; rethrows its failure.
  virtual void wait(CopyTicket ticket) = 0;
  [[nodiscard]] virtual bool done(CopyTicket ticket) = 0;
  /// Whether submit() returns before the copy, and before await_source.
  [[nodiscard]] virtual bool asynchronous() const noexcept = 0;
};

}  // namespace castor
