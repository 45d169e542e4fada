#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "core/ledger.h"
#include "core/memory_tier.h"
#include "core/mutex.h"

namespace castor {

/// Host buffers of one size after the other: offloaded activations, and a rank's own copies of
/// payloads (Payload::take_copy, GradientShards). A buffer that is given back is kept for the next
/// one of its size, because the next pass needs the same sizes. On a GPU buffers are page-locked,
/// which takes far longer than some of them are needed.
///
/// The host pays for every buffer in use; the account says who pays for those that are kept.
/// Thread-safe; its mutex is a leaf.
class HostBlocks {
 public:
  enum class Account : std::uint8_t {
    kHost,    ///< the host, for no more bytes than were in use at once so far: batches of other
              ///< lengths need other sizes
    kNobody,  ///< nobody: the bytes are limited, and where a buffer is taken, no more are kept
              ///< beside it than the host has left
  };

  /// `remedy`: what OutOfMemory tells the user to change. At most `most_kept` bytes are kept.
  HostBlocks(std::shared_ptr<MemoryTier> host, std::string remedy, Account account,
             std::size_t most_kept = kUnlimited);

  /// Returns a buffer of `bytes`. Gives kept buffers of other sizes back before the host counts as
  /// full. Throws OutOfMemory.
  [[nodiscard]] Block take(std::size_t bytes);
  /// Takes back a buffer of take().
  void give_back(Block block) noexcept;
  /// Keeps no buffer from now on.
  void end() noexcept;
  /// Returns the bytes of buffers that are kept.
  [[nodiscard]] std::size_t kept_bytes() const;

 private:
  static constexpr std::size_t kUnlimited = ~std::size_t{0} >> 1;

  [[nodiscard]] Block make(std::size_t bytes);
  /// Returns an empty block where none of this size is kept.
  [[nodiscard]] Block take_kept(std::size_t bytes);
  /// Gives back what is kept beyond the limit, the longest kept first.
  void keep_at_most(std::size_t bytes) noexcept;
  /// Takes those blocks out; the caller frees them without the mutex.
  [[nodiscard]] std::deque<Block> excess(std::size_t bytes) CASTOR_REQUIRES(mutex_);

  const std::shared_ptr<MemoryTier> host_;
  const std::string remedy_;
  const Account account_;
  Ledger unpaid_{TierKind::kHost, kUnlimited};  // of kept blocks that nobody pays for
  mutable Mutex mutex_;
  std::deque<Block> kept_ CASTOR_GUARDED_BY(mutex_);  // the last that came back at the end
  std::size_t kept_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t used_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t most_used_bytes_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t most_kept_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
