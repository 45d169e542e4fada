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
  /// Stream that the copy is ordered behind: the copy begins after all work that the stream had
  /// been given at submission, which wrote the device's side or still uses it.
  StreamId behind{};
  /// Function that is called before the source is read, where something still writes the source. It
  /// returns when the source is ready; an exception of it is the copy's failure. Empty: the source
  /// is ready.
  std::function<void()> await_source;
};

/// Name of a submitted copy; grows with each submission of a direction. 0 names "nothing to wait
/// for".
enum class CopyTicket : std::uint64_t { kNone = 0 };

/// Seam for copies of chunk payloads between device and host. Copies of one direction complete in
/// the order of submission. The caller keeps both buffers alive until the ticket is done, or until
/// whatever may reuse them is ordered behind the copy. Destruction waits for every copy in flight.
/// Thread-safe.
class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  [[nodiscard]] virtual CopyTicket submit(const CopyRequest& request) = 0;
  /// Returns when the copy is done; rethrows its failure.
  virtual void wait(CopyTicket ticket) = 0;
  /// Orders work that `stream` is given from now on behind the copy. Rethrows the copy's failure,
  /// as far as it is known. Returns at once where the device waits by itself.
  virtual void order(CopyTicket ticket, StreamId /*stream*/) { wait(ticket); }
  [[nodiscard]] virtual bool done(CopyTicket ticket) = 0;
  /// Returns whether submit() returns before the copy is done, and before await_source is called.
  [[nodiscard]] virtual bool asynchronous() const noexcept = 0;
};

}  // namespace castor
