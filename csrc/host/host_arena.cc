#include "host/host_arena.h"

#include <string>
#include <utility>

#include "host/mmap_arena.h"
#include "host/numa.h"
#include "host/page_source.h"

#if defined(CASTOR_HAVE_JEMALLOC)
#include "host/jemalloc_arena.h"
#endif

namespace castor {
namespace {

std::unique_ptr<PageSource> make_pages(const HostArenaOptions& options) {
  auto pages = std::make_unique<OsPages>();
  if (!options.numa_node) {
    return pages;
  }
  return std::make_unique<BoundPages>(std::move(pages), NumaTopology(), *options.numa_node);
}

#if !defined(CASTOR_HAVE_JEMALLOC)

/// The mmap arena, which says why it is not the jemalloc one.
class FallbackArena final : public Arena {
 public:
  explicit FallbackArena(std::unique_ptr<PageSource> pages) : arena_(std::move(pages)) {}

  [[nodiscard]] std::byte* allocate(std::size_t bytes) override { return arena_.allocate(bytes); }
  void deallocate(std::byte* data, std::size_t bytes) noexcept override {
    arena_.deallocate(data, bytes);
  }
  void discard(std::byte* data, std::size_t bytes) noexcept override {
    arena_.discard(data, bytes);
  }
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override {
    arena_.share_with_children(data, bytes);
  }
  [[nodiscard]] std::string description() const override {
    return arena_.description() + " (built without jemalloc)";
  }

 private:
  MmapArena arena_;
};

#endif

}  // namespace

std::unique_ptr<Arena> make_host_arena(const HostArenaOptions& options) {
  if (options.adapt_pages)
    return std::make_unique<MmapArena>(options.adapt_pages(make_pages(options)));
#if defined(CASTOR_HAVE_JEMALLOC)
  return std::make_unique<JemallocArena>(make_pages(options));
#else
  return std::make_unique<FallbackArena>(make_pages(options));
#endif
}

}  // namespace castor
