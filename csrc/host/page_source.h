#pragma once

#include <atomic>
#include <cstddef>
#include <string>

namespace castor {

/// The page sizes of this machine, in bytes.
struct PageSizes {
  std::size_t page = 0;
  /// Size of a transparent huge page; 0 where the kernel has none.
  std::size_t huge = 0;
};

[[nodiscard]] PageSizes system_page_sizes();

/// Seam between the host arenas and the operating system's pages: OsPages in production, BoundPages
/// to place them on a NUMA node, sources that refuse in tests. Thread-safe. Nothing here throws,
/// because jemalloc calls it from its extent hooks: refusal is a value.
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

  /// "mmap, huge pages of 2.00 MiB (2097152 bytes) advised".
  [[nodiscard]] virtual std::string description() const = 0;
};

/// Private anonymous mappings of the operating system. Owns no memory: the arenas do.
class OsPages final : public PageSource {
 public:
  OsPages();

  [[nodiscard]] std::byte* map(std::size_t bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] bool unmap(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] bool discard(std::byte* data, std::size_t bytes) noexcept override;
  void advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept override;
  [[nodiscard]] std::string description() const override;

 private:
  void note_refusal(int error_number) noexcept;

  const PageSizes sizes_;
  // Relaxed: figures for reports, they order nothing.
  std::atomic<std::size_t> num_refusals_{0};
  std::atomic<int> last_refusal_{0};
};

/// The error of every host arena when the operating system refuses `bytes`. Its figures are those
/// of the machine: free physical memory as `available`, installed memory as `budget`.
[[noreturn]] void throw_refused(std::size_t bytes, const std::string& who_refused);

}  // namespace castor
