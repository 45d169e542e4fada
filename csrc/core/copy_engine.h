#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "core/compute_stream.h"

namespace castor {

enum class CopyDirection { kHostToDevice, kDeviceToHost };

/// One copy between non-overlapping buffers of equal size.
struct CopyRequest {
  std::span<const std::byte> source;
  std::span<std::byte> target;
  CopyDirection direction = CopyDirection::kHostToDevice;
  /// The copy is behind all that this stream had been given when it was submitted: what wrote the
  /// device's side, or still uses it.
  StreamId behind{};
  /// Called before the source is read, where something still writes it: returns when that is done,
  /// and what it throws is the copy's failure. Empty: the source is ready.
  std::function<void()> await_source;
};

/// Names a submitted copy; grows with each submission of a direction. 0 names "nothing to wait
/// for".
enum class CopyTicket : std::uint64_t { kNone = 0 };

/// Seam for moving chunk payloads between device and host. Copies of one direction complete in the
/// order of submission. The caller keeps both buffers alive until the ticket is done, or until
/// those who may reuse them are behind the copy. Destruction waits for every copy in flight.
/// Thread-safe.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  [[nodiscard]] virtual CopyTicket submit(const CopyRequest& request) = 0;
  /// Returns when the copy is done; rethrows its failure.
  virtual void wait(CopyTicket ticket) = 0;
  /// What `stream` is given from now on comes behind the copy; rethrows its failure, as far as that
  /// is known. Returns at once where the device waits by itself.
  virtual void order(CopyTicket ticket, StreamId /*stream*/) { wait(ticket); }
  [[nodiscard]] virtual bool done(CopyTicket ticket) = 0;
  /// Whether submit() returns before the copy, and before await_source.
  [[nodiscard]] virtual bool asynchronous() const noexcept = 0;
};

}  // namespace castor
