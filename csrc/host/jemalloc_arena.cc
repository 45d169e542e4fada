#include "host/jemalloc_arena.h"

#include <jemalloc/jemalloc.h>

#include <cassert>
#include <cstdint>
#include <cstdio>
#include <system_error>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "core/units.h"

// jemalloc reads this symbol once, before its first call. No retained extents: what a block leaves
// is unmapped, and a new extent is mapped in its own size, not in the next of a growing series. One
// automatic arena and no thread caches: castor uses the arenas it creates, and never the caches.
const char* je_malloc_conf = "retain:false,narenas:1,tcache:false";

namespace castor {

/// jemalloc's table of hooks, and behind it what they work on: jemalloc hands the table back to
/// every hook, and the table is the first member.
struct JemallocArena::Hooks {
  extent_hooks_t table{};
  std::unique_ptr<PageSource> pages;
  std::size_t page = 0;
  // Relaxed: a counter only.
  std::atomic<std::size_t> mapped_bytes{0};

  explicit Hooks(std::unique_ptr<PageSource> source) : pages(std::move(source)) {
    table.alloc = &Hooks::alloc;
    table.dalloc = &Hooks::dalloc;
    table.destroy = &Hooks::destroy;
    table.purge_forced = &Hooks::purge_forced;
    table.split = &Hooks::split;
    table.merge = &Hooks::merge;
    // No commit, decommit and lazy purge: jemalloc takes a null hook for "refused".
  }

  static Hooks& from(extent_hooks_t* table) noexcept { return *reinterpret_cast<Hooks*>(table); }

  static void* alloc(extent_hooks_t* table, void* new_address, std::size_t bytes,
                     std::size_t alignment, bool* zero, bool* commit, unsigned /*arena*/) noexcept {
    if (new_address != nullptr) {
      return nullptr;  // growth in place: never needed, jemalloc then maps elsewhere
    }
    Hooks& self = from(table);
    std::byte* const data = self.pages->map(bytes, alignment);
    if (data != nullptr) {
      *zero = true;
      *commit = true;
      self.mapped_bytes.fetch_add(bytes, std::memory_order_relaxed);
    }
    return data;
  }

  // The hooks below return true for "refused".
  static bool dalloc(extent_hooks_t* table, void* data, std::size_t bytes, bool /*committed*/,
                     unsigned /*arena*/) noexcept {
    Hooks& self = from(table);
    if (!self.pages->unmap(static_cast<std::byte*>(data), bytes)) {
      return true;  // jemalloc then purges the extent and keeps it for reuse
    }
    self.mapped_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    return false;
  }

  static void destroy(extent_hooks_t* table, void* data, std::size_t bytes, bool committed,
                      unsigned arena) noexcept {
    if (dalloc(table, data, bytes, committed, arena)) {
      // The addresses are lost, the memory need not be. A refusal is counted by the PageSource.
      (void)from(table).pages->discard(static_cast<std::byte*>(data), bytes);
    }
  }

  static bool purge_forced(extent_hooks_t* table, void* data, std::size_t /*bytes*/,
                           std::size_t offset, std::size_t length, unsigned /*arena*/) noexcept {
    return !from(table).pages->discard(static_cast<std::byte*>(data) + offset, length);
  }

  static bool split(extent_hooks_t* /*table*/, void* /*data*/, std::size_t /*bytes*/,
                    std::size_t /*left*/, std::size_t /*right*/, bool /*committed*/,
                    unsigned /*arena*/) noexcept {
    return false;  // pages have no owner below the arena
  }

  static bool merge(extent_hooks_t* /*table*/, void* /*left*/, std::size_t /*left_bytes*/,
                    void* /*right*/, std::size_t /*right_bytes*/, bool /*committed*/,
                    unsigned /*arena*/) noexcept {
    return false;
  }
};

JemallocArena::JemallocArena() : JemallocArena(std::make_unique<OsPages>()) {}

JemallocArena::JemallocArena(std::unique_ptr<PageSource> pages)
    : sizes_(system_page_sizes()), hooks_(std::make_unique<Hooks>(std::move(pages))) {
  static_assert(std::is_standard_layout_v<Hooks>, "jemalloc's table stands for the whole object");
  extent_hooks_t* table = &hooks_->table;
  std::size_t index_bytes = sizeof(index_);
  if (const int error = je_mallctl("arenas.create", &index_, &index_bytes, &table, sizeof(table));
      error != 0) {
    throw Error("jemalloc could not create an arena: " + std::generic_category().message(error));
  }
  try {
    ssize_t at_once = 0;
    set("dirty_decay_ms", &at_once, sizeof(at_once));
    set("muzzy_decay_ms", &at_once, sizeof(at_once));
  } catch (...) {
    destroy();
    throw;
  }
}

JemallocArena::~JemallocArena() { destroy(); }

void JemallocArena::destroy() noexcept {
  char name[64];
  std::snprintf(name, sizeof(name), "arena.%u.destroy", index_);
  const int error = je_mallctl(name, nullptr, nullptr, nullptr, 0);
  assert(error == 0 && "jemalloc did not destroy an arena");
  if (error != 0) {
    static_cast<void>(hooks_.release());  // jemalloc still points to them
  }
}

void JemallocArena::set(const char* name, void* value, std::size_t value_bytes) const {
  const std::string path = "arena." + std::to_string(index_) + "." + name;
  const int error = je_mallctl(path.c_str(), nullptr, nullptr, value, value_bytes);
  if (error != 0) {
    throw Error("jemalloc refused to set " + path + ": " + std::generic_category().message(error));
  }
}

int JemallocArena::flags_for(std::size_t bytes) const noexcept {
  const bool huge = sizes_.huge > 0 && bytes >= sizes_.huge;
  return MALLOCX_ARENA(index_) | MALLOCX_TCACHE_NONE |
         MALLOCX_ALIGN(huge ? sizes_.huge : kParamAlignment);
}

std::byte* JemallocArena::allocate(std::size_t bytes) {
  if (bytes == 0) {
    throw InvalidArgument("an arena block has at least 1 byte; 0 were requested");
  }
  const int flags = flags_for(bytes);
  // nallocx is 0 for sizes beyond jemalloc's largest class, where mallocx has no defined result.
  auto* const data =
      je_nallocx(bytes, flags) == 0 ? nullptr : static_cast<std::byte*>(je_mallocx(bytes, flags));
  if (data == nullptr) {
    throw_refused(bytes, "the pages under jemalloc were refused");
  }
  if (sizes_.huge > 0 && bytes >= sizes_.huge) {
    hooks_->pages->advise_huge(data, bytes, je_sallocx(data, flags));
  }
  withhold_whole_pages(*hooks_->pages, data, bytes);
  return data;
}

void JemallocArena::deallocate(std::byte* data, std::size_t bytes) noexcept {
  je_sdallocx(data, bytes, flags_for(bytes));
}

void JemallocArena::discard(std::byte* data, std::size_t bytes) noexcept {
  discard_whole_pages(*hooks_->pages, data, bytes);
}

void JemallocArena::share_with_children(std::byte* data, std::size_t bytes) noexcept {
  share_whole_pages(*hooks_->pages, data, bytes);
}

std::string JemallocArena::description() const {
  return "jemalloc arena " + std::to_string(index_) + " over " + hooks_->pages->description();
}

std::size_t JemallocArena::mapped_bytes() const noexcept {
  return hooks_->mapped_bytes.load(std::memory_order_relaxed);
}

}  // namespace castor
