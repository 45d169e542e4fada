#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

namespace castor {

/// A message under way to or from another rank. Move nothing of its buffer until it is over; what
/// ends it touches the buffer no more.
class RankMessage {
 public:
  virtual ~RankMessage() = default;
  /// Returns when the message has been sent, or is there. Throws Error, which names the other rank,
  /// where that is gone, or after stop().
  virtual void wait() = 0;
  /// Nobody waits for it any more. From any thread.
  virtual void stop() noexcept = 0;
};

/// Seam between ranks that ask each other for something without meeting: messages from one to one.
/// Process groups in csrc/dist, threads of one process in tests. Messages between two ranks that
/// have the same tag arrive in order. Thread-safe.
class RankMessages {
 public:
  virtual ~RankMessages() = default;

  [[nodiscard]] virtual std::size_t rank() const noexcept = 0;
  [[nodiscard]] virtual std::size_t size() const noexcept = 0;

  /// Throws as RankMessage::wait.
  [[nodiscard]] virtual std::unique_ptr<RankMessage> send(std::size_t to, std::uint32_t tag,
                                                          std::span<const std::byte> bytes) = 0;
  /// As many as the other rank sends. Throws as RankMessage::wait.
  [[nodiscard]] virtual std::unique_ptr<RankMessage> receive(std::size_t from, std::uint32_t tag,
                                                             std::span<std::byte> bytes) = 0;
  /// Waits for any rank and returns which it was; nullopt: after stop(). Throws Error where that
  /// cannot be known any more. By one thread.
  [[nodiscard]] virtual std::optional<std::size_t> receive_any(std::uint32_t tag,
                                                               std::span<std::byte> bytes) = 0;
  /// Ends receive_any, now and for good. From any thread.
  virtual void stop() noexcept = 0;
};

}  // namespace castor
