#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/mutex.h"
#include "io/chunk_stream.h"

namespace castor {

/// Activations on NVMe that the host has no room for: bytes in pages, which are the chunks of a
/// ChunkStream, written and read through its window, checksummed as all that lies there.
///
/// Owned by an ActivationOffload; borrows the stream. Thread-safe; nobody reads pages that are
/// being written. For what write and read throw see ChunkStream.
class ActivationPages {
 public:
  static constexpr std::size_t kPageBytes = std::size_t{1} << 20;
  /// Slots of the window: pages on their way while others are copied; and at least.
  static constexpr std::size_t kSlots = 8;
  static constexpr std::size_t kLeastSlots = 2;
  using Pages = std::vector<std::size_t>;

  ActivationPages(ChunkStream& stream, std::size_t num_pages);

  /// Pages for so many bytes; nullopt where there are too few.
  [[nodiscard]] std::optional<Pages> try_take(std::size_t bytes);
  void give_back(const Pages& pages) noexcept;

  /// Copies what lies at an offset into a page, or out of it.
  using Copy = std::function<void(std::size_t offset, std::span<std::byte> page)>;
  /// Fills the pages with so many bytes; they are written beside what follows.
  void write(const Pages& pages, std::size_t bytes, const Copy& fill);
  void read(const Pages& pages, std::size_t bytes, const Copy& take);
  /// They will be read soon: as many as the window has room for are read ahead.
  void announce(const Pages& pages);
  /// What was announced and not read will not be read soon.
  void forget_announced() { stream_.forget_announced(); }

  /// Of pages that nobody has.
  [[nodiscard]] std::size_t free_bytes() const;

 private:
  static std::span<std::byte> part(std::span<std::byte> page, std::size_t offset,
                                   std::size_t bytes);

  ChunkStream& stream_;
  mutable Mutex mutex_;
  Pages free_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
