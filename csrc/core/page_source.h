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

  /// Readable, writable, zeroed memory, aligned to `alignment` (a power of two, at least a page).
  /// nullptr when refused; errno then says why.
  [[nodiscard]] virtual std::byte* map(std::size_t bytes, std::size_t alignment) noexcept = 0;
  /// Ends the mapping of these pages, which may be a part or a union of what map() returned.
  /// False when refused: the pages are then still mapped.
  [[nodiscard]] virtual bool unmap(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Gives the physical memory back and keeps the mapping; the contents become zero.
  [[nodiscard]] virtual bool discard(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Asks for huge pages on the part of [data, data + used) that consists of whole huge pages, and
  /// for small ones on the rest of [data, data + mapped), so that touching the last used byte does
  /// not make pages behind it resident. Refusal is tolerated and shows in description().
  virtual void advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept = 0;
  /// Gives these pages physical memory now, by several threads where there is much of it: whoever
  /// touches them one by one waits for one processor to clear them all. What the system refuses
  /// stays as it was.
  virtual void make_resident(std::byte* data, std::size_t bytes) noexcept = 0;
  /// Processes that this one forks from now on do not get these pages. Else each page that is
  /// written while such a child lives is copied, and the child keeps the old one. A refusal shows
  /// in description().
  virtual void withhold_from_children(std::byte* data, std::size_t bytes) noexcept = 0;
  /// They get them again.
  virtual void share_with_children(std::byte* data, std::size_t bytes) noexcept = 0;

  /// "mmap, huge pages of 2.00 MiB (2097152 bytes) advised".
  [[nodiscard]] virtual std::string description() const = 0;
};

}  // namespace castor
