#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "core/memory_tier.h"
#include "host/page_source.h"

namespace castor {

/// A jemalloc arena of its own, whose extents come from a PageSource through extent hooks. Exists
/// only where castor is built with jemalloc (CASTOR_HAVE_JEMALLOC).
///
/// Sizes: jemalloc rounds a request up to its size class, by up to 25%. For blocks of at least a
/// huge page that excess is address space only. The block starts on a huge-page boundary; huge
/// pages are asked for where they lie inside the request and refused behind it. So resident memory
/// never exceeds the request rounded up to a small page. A PageSource that makes pages resident on
/// mapping (pinned memory) does pay for the excess. Small blocks share pages; for them the rounding
/// is real.
///
/// Memory: extents without a live block are unmapped at once (nothing is retained, both decay times
/// are 0), so resident memory follows the budget. The destructor destroys the jemalloc arena with
/// all its extents. jemalloc keeps its own metadata, a few KiB per arena index, for the next arena.
///
/// Forks: children do not get the pages that lie wholly in blocks. They do get jemalloc's metadata,
/// which jemalloc reads in every fork and which comes through the same hooks.
///
/// Owned by its MemoryTier; every block must be given back before the arena is destroyed.
/// Thread-safe.
class JemallocArena final : public Arena {
 public:
  /// Throws Error if jemalloc cannot make another arena, or its first mapping is refused.
  JemallocArena();
  explicit JemallocArena(std::unique_ptr<PageSource> pages);
  ~JemallocArena() override;

  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  void deallocate(std::byte* data, std::size_t bytes) noexcept override;
  void discard(std::byte* data, std::size_t bytes) noexcept override;
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] std::string description() const override;

  /// Returns the bytes mapped for this arena now: size classes of live blocks, and the arena's own
  /// metadata.
  [[nodiscard]] std::size_t mapped_bytes() const noexcept;

 private:
  struct Hooks;

  [[nodiscard]] int flags_for(std::size_t bytes) const noexcept;
  void set(const char* name, void* value, std::size_t value_bytes) const;
  void destroy() noexcept;

  const PageSizes sizes_;
  // jemalloc holds a pointer to the hooks as long as its arena exists.
  std::unique_ptr<Hooks> hooks_;
  unsigned index_ = 0;
};

}  // namespace castor
