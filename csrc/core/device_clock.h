#pragma once

#include <cstdint>
#include <span>

#include "core/compute_stream.h"

namespace castor {

/// Clock of a device that works beside the host, which hands it work ahead of time. Marks lie in
/// the streams that compute; the clock tells when the device came to each. Streams that are marked
/// one after the other are ordered, as ComputeStream orders them.
///
/// Owned by a runtime, whose mutex guards it: not thread-safe. All functions but times_ns() throw
/// Error where the device has failed.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  /// Puts a mark behind all that `stream` has been given so far. Does not wait.
  virtual void mark(StreamId stream) = 0;
  /// Returns whether the device has come to every mark. Does not wait.
  [[nodiscard]] virtual bool passed() = 0;
  /// Returns the nanoseconds from the first mark to each mark that passed() has seen the device
  /// come to, in order. Valid until the next call of another function.
  [[nodiscard]] virtual std::span<const std::uint64_t> times_ns() const noexcept = 0;
  /// Forgets all marks: the next one is the first.
  virtual void forget() noexcept = 0;
};

}  // namespace castor
