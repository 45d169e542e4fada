#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace castor {

enum class CopyDirection { kHostToDevice, kDeviceToHost };

/// One copy between non-overlapping buffers of equal size.
struct CopyRequest {
  std::span<const std::byte> source;
  std::span<std::byte> target;
  CopyDirection direction = CopyDirection::kHostToDevice;
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
};

}  // namespace castor
