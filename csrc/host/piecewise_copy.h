#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <vector>

#include "core/executor.h"

namespace castor {

/// A copy that several threads make together, a piece at a time. One thread may work on it in its
/// own time; a thread that needs the result takes over the pieces that nobody has begun.
/// Thread-safe but for add.
class PiecewiseCopy {
 public:
  static constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

  /// Adds a range to copy, before any thread copies. The memory stays in place and unchanged until
  /// all is copied, and source and target do not overlap. `target` is aligned to 16 bytes.
  void add(std::span<const std::byte> source, std::byte* target);
  /// Copies what is left, and returns when all is copied. `executor` provides the threads; with
  /// nullptr the caller copies alone.
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

/// Copies past the processor's caches where it can. Meant for memory that is not read soon, so that
/// the contents of the caches stay there. The conditions are those of PiecewiseCopy::add.
void copy_past_caches(std::span<const std::byte> source, std::byte* target) noexcept;

}  // namespace castor
