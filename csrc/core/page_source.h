#pragma once

#include <cstddef>
#include <string>

namespace castor {

/// Seam between the host arenas and the operating system's pages: OsPages in production, BoundPages
/// to place them on a NUMA node, PinnedPages to register them with CUDA, sources that refuse in
/// tests. Thread-safe. Nothing here throws, because jemalloc calls it from its extent hooks:
/// refusal is a value.
///
/// `bytes` is a positive multiple of the page size everywhere, and `data` a page boundary.
class PageSource {
 public:
  virtual ~PageSource() = default;

  /// Maps readable, writable, zeroed memory, aligned to `alignment` (a power of two, at least a
  /// page). Returns nullptr when refused; errno then says why.
  [[nodiscard]] virtual std::byte* map(std::size_t bytes, std::size_t alignment) noexcept = 0;
  /// Ends the mapping of these pages, which may be a part or a union of what map() returned.
  /// Returns false when refused: the pages are then still mapped.
  [[nodiscard]] virtual bool unmap(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Gives the physical memory back and keeps the mapping; the contents become zero. Returns false
  /// when refused.
  [[nodiscard]] virtual bool discard(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Asks for huge pages on the part of [data, data + used) that consists of full huge pages, and
  /// for small ones on the rest of [data, data + mapped). Touching the last used byte then makes no
  /// pages behind it resident. Refusal is tolerated and shows in description().
  virtual void advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept = 0;
  /// Gives these pages physical memory now, on several threads where there is much of it. A thread
  /// that touched them one by one would wait for one processor to clear them all. Pages that the
  /// system refuses stay as they were.
  virtual void make_resident(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Withholds these pages from processes that this one forks from now on. Otherwise each page that
  /// is written while such a child lives is copied, and the child keeps the old one. A refusal
  /// shows in description().
  virtual void withhold_from_children(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Lets processes that this one forks from now on get these pages again.
  virtual void share_with_children(std::byte* data, std::size_t bytes) noexcept = 0;

  /// Returns a description for reports: "mmap, huge pages of 2.00 MiB (2097152 bytes) advised".
  [[nodiscard]] virtual std::string description() const = 0;
};

}  // namespace castor
