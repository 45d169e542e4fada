#include "host/mmap_arena.h"

#include <cassert>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {

MmapArena::MmapArena() : MmapArena(std::make_unique<OsPages>()) {}

MmapArena::MmapArena(std::unique_ptr<PageSource> pages)
    : sizes_(system_page_sizes()), pages_(std::move(pages)) {}

MmapArena::~MmapArena() { assert(mapped_bytes() == 0 && "a block outlived its arena"); }

std::byte* MmapArena::allocate(std::size_t bytes) {
  if (bytes == 0) {
    throw InvalidArgument("an arena block has at least 1 byte; 0 were requested");
  }
  if (bytes > SIZE_MAX - sizes_.page) {
    throw_refused(bytes, "the address space refused");
  }
  const std::size_t mapped = align_up(bytes, sizes_.page);
  const bool huge = sizes_.huge > 0 && bytes >= sizes_.huge;
  std::byte* const data = pages_->map(mapped, huge ? sizes_.huge : sizes_.page);
  if (data == nullptr) {
    throw_refused(bytes, "mmap refused: " + std::generic_category().message(errno));
  }
  if (huge) {
    pages_->advise_huge(data, bytes, mapped);
  }
  pages_->withhold_from_children(data, mapped);
  mapped_bytes_.fetch_add(mapped, std::memory_order_relaxed);
  return data;
}

void MmapArena::deallocate(std::byte* data, std::size_t bytes) noexcept {
  const std::size_t mapped = align_up(bytes, sizes_.page);
  [[maybe_unused]] const std::size_t before =
      mapped_bytes_.fetch_sub(mapped, std::memory_order_relaxed);
  assert(before >= mapped && "more bytes given back than taken");
  // munmap in the middle of a merged mapping can be refused (vm.max_map_count). The addresses are
  // then lost, the memory need not be.
  if (!pages_->unmap(data, mapped) && !pages_->discard(data, mapped)) {
    stuck_bytes_.fetch_add(mapped, std::memory_order_relaxed);
  }
}

void MmapArena::discard(std::byte* data, std::size_t bytes) noexcept {
  discard_whole_pages(*pages_, data, bytes);
}

void MmapArena::share_with_children(std::byte* data, std::size_t bytes) noexcept {
  pages_->share_with_children(data, align_up(bytes, sizes_.page));
}

std::string MmapArena::description() const {
  std::string text = "mmap arena over " + pages_->description();
  if (const std::size_t stuck = stuck_bytes_.load(std::memory_order_relaxed); stuck > 0) {
    text += ", " + format_bytes(stuck) + " could not be returned to the system";
  }
  return text;
}

}  // namespace castor
