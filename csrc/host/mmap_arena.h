#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>

#include "core/memory_tier.h"
#include "host/page_source.h"

namespace castor {

/// Arena with one mapping per block. A block of at least a huge page starts on a huge-page
/// boundary. Every size is rounded up to whole pages, and no more than that can become resident. A
/// freed block goes back to the operating system at once, so resident memory follows the budget's
/// figures. Processes that this one forks do not get the blocks.
///
/// Meant for chunk-sized blocks: each costs system calls and page faults. Owned by its MemoryTier;
/// every block must be given back before the arena is destroyed. Thread-safe.
class MmapArena final : public Arena {
 public:
  MmapArena();
  explicit MmapArena(std::unique_ptr<PageSource> pages);
  ~MmapArena() override;

  [[nodiscard]] std::byte* allocate(std::size_t bytes) override;
  void deallocate(std::byte* data, std::size_t bytes) noexcept override;
  void discard(std::byte* data, std::size_t bytes) noexcept override;
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] std::string description() const override;

  /// Returns the bytes mapped now: the live blocks, each rounded up to whole pages.
  [[nodiscard]] std::size_t mapped_bytes() const noexcept {
    return mapped_bytes_.load(std::memory_order_relaxed);
  }

 private:
  const PageSizes sizes_;
  const std::unique_ptr<PageSource> pages_;
  // Relaxed: counters only, they publish no other data.
  std::atomic<std::size_t> mapped_bytes_{0};
  std::atomic<std::size_t> stuck_bytes_{0};  // bytes that unmap refused
};

}  // namespace castor
