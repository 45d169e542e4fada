#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <vector>

#include "core/executor.h"

namespace castor {

/// A copy that threads make together, a piece at a time: one may work on it in its own time, and
/// who needs it takes over what nobody has begun with. Thread-safe but for add.
class PiecewiseCopy {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

  /// Before any thread copies. The memory is there and unchanged until all is copied, and does not
  /// overlap; `target` is aligned to 16 bytes.
  void add(std::span<const std::byte> source, std::byte* target);
  /// Returns when all is copied. `executor`: whose threads do it; nullptr: the caller alone.
  void finish(Executor* executor);

 private:
  struct Piece {
    std::span<const std::byte> source;
    std::byte* target;
  };

  [[nodiscard]] bool copy_next() noexcept;

  std::vector<Piece> pieces_;
  std::atomic<std::size_t> num_begun_ = 0;
  std::atomic<std::size_t> num_copied_ = 0;
};

/// Copies past the processor's caches, where it can: for memory that is not read soon, so that what
/// is in the caches stays there. As PiecewiseCopy::add.
void copy_past_caches(std::span<const std::byte> source, std::byte* target) noexcept;

}  // namespace castor
