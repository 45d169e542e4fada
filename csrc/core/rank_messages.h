#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace castor {

/// Message under way to or from another rank. The caller leaves the buffer in place and untouched
/// until the message is over. What ends the message does not touch the buffer afterwards.
class RankMessage {
 public:
  virtual ~RankMessage() = default;
  /// Returns when the message has been sent or received. Throws Error, which names the other rank,
  /// where that rank is gone, or after stop().
  virtual void wait() = 0;
  /// Ends the message: nobody waits for it any more. From any thread.
  virtual void stop() noexcept = 0;
};

/// Seam for messages from one rank to another, without a collective: process groups in csrc/c10d,
/// threads of one process in tests. Messages between two ranks that have the same tag arrive in
/// order. Thread-safe.
class RankMessages {
 public:
  virtual ~RankMessages() = default;

  [[nodiscard]] virtual std::size_t rank() const noexcept = 0;
  [[nodiscard]] virtual std::size_t size() const noexcept = 0;

  /// Starts to send `bytes`. Throws as RankMessage::wait does.
  [[nodiscard]] virtual std::unique_ptr<RankMessage> send(std::size_t to, std::uint32_t tag,
                                                          std::span<const std::byte> bytes) = 0;
  /// Starts to receive `bytes`, as many as the other rank sends. Throws as RankMessage::wait does.
  [[nodiscard]] virtual std::unique_ptr<RankMessage> receive(std::size_t from, std::uint32_t tag,
                                                             std::span<std::byte> bytes) = 0;
  /// Waits for a message of any rank and returns that rank; nullopt: after stop(). Throws Error
  /// where the rank cannot be known any more. Called by one thread.
  [[nodiscard]] virtual std::optional<std::size_t> receive_any(std::uint32_t tag,
                                                               std::span<std::byte> bytes) = 0;
  /// Ends receive_any, now and for good. From any thread.
  virtual void stop() noexcept = 0;
};

}  // namespace castor
