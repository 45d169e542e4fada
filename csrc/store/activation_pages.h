#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/mutex.h"
#include "io/chunk_stream.h"

namespace castor {

/// Pages on NVMe for activations that the host has no room for. The pages are the chunks of a
/// ChunkStream: they are written and read through its window, with checksums as everything on NVMe.
///
/// Owned by an ActivationOffload; borrows the stream. Thread-safe, but no page may be read while it
/// is being written. See ChunkStream for what write() and read() throw.
class ActivationPages {
 public:
  static constexpr std::size_t kPageBytes = std::size_t{1} << 20;
  /// Window buffers, for pages on their way while others are copied: the most and the fewest.
  static constexpr std::size_t kSlots = 8;
  static constexpr std::size_t kLeastSlots = 2;
  using Pages = std::vector<std::size_t>;

  ActivationPages(ChunkStream& stream, std::size_t num_pages);

  /// Takes pages for `bytes` bytes; returns nullopt where too few are free.
  [[nodiscard]] std::optional<Pages> try_take(std::size_t bytes);
  void give_back(const Pages& pages) noexcept;

  /// Function that copies the bytes at an offset into a page, or out of it.
  using Copy = std::function<void(std::size_t offset, std::span<std::byte> page)>;
  /// Fills the pages with `bytes` bytes. The pages are written to NVMe in the background.
  void write(const Pages& pages, std::size_t bytes, const Copy& fill);
  void read(const Pages& pages, std::size_t bytes, const Copy& take);
  /// Announces that the pages will be read soon: reads ahead as many as the window has room for.
  void announce(const Pages& pages);
  /// Forgets the announced pages that were not read: they will not be read soon.
  void forget_announced() { stream_.forget_announced(); }

  /// Returns the bytes of the pages that are free.
  [[nodiscard]] std::size_t free_bytes() const;

 private:
  static std::span<std::byte> part(std::span<std::byte> page, std::size_t offset,
                                   std::size_t bytes);

  ChunkStream& stream_;
  mutable Mutex mutex_;
  Pages free_ CASTOR_GUARDED_BY(mutex_);
};

}  // namespace castor
