#include "host/page_source.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <fstream>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/units.h"

namespace castor {
namespace {

#if defined(MADV_POPULATE_WRITE)
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; older ones refuse it
#endif
constexpr std::size_t kPopulatedAtOnce = 64 * kMiB;
constexpr std::size_t kMostPopulatingThreads = 16;

std::size_t system_value(int name) {
  const long value = ::sysconf(name);
  if (value < 0) {
    throw Error("sysconf(" + std::to_string(name) + ") failed; castor needs a Linux system");
  }
  return static_cast<std::size_t>(value);
}

std::uintptr_t address_of(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

/// The pages that lie wholly in these bytes.
std::span<std::byte> whole_pages(std::byte* data, std::size_t bytes) {
  static const std::size_t page = system_page_sizes().page;
  const std::size_t head = (page - address_of(data) % page) % page;
  return bytes < head + page ? std::span<std::byte>()
                             : std::span(data + head, (bytes - head) / page * page);
}

}  // namespace

PageSizes system_page_sizes() {
  PageSizes sizes{.page = system_value(_SC_PAGESIZE), .huge = 0};
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  if (std::size_t bytes = 0; file >> bytes && bytes > sizes.page && bytes % sizes.page == 0) {
    sizes.huge = bytes;
  }
  return sizes;
}

OsPages::OsPages(Discard discard)
    : discard_advice_(discard == Discard::kAtOnce ? MADV_DONTNEED : MADV_FREE),
      process_(::getpid()),
      sizes_(system_page_sizes()) {}

bool OsPages::in_child() const noexcept { return ::getpid() != process_; }

std::byte* OsPages::map(std::size_t bytes, std::size_t alignment) noexcept {
  const std::size_t slack = alignment > sizes_.page ? alignment - sizes_.page : 0;
  if (bytes > SIZE_MAX - slack) {
    errno = ENOMEM;
    return nullptr;
  }
  void* const mapping = ::mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, /*fd=*/-1, /*offset=*/0);
  if (mapping == MAP_FAILED) {
    return nullptr;
  }
  auto* const begin = static_cast<std::byte*>(mapping);
  const std::size_t head = (alignment - address_of(begin) % alignment) % alignment;
  const std::size_t tail = slack - head;
  std::byte* const data = begin + head;
  // Trimming splits nothing and so is not refused in practice; if it is, the slack must not stay.
  if (head > 0 && ::munmap(begin, head) != 0) {
    const int reason = errno;
    note_refusal(::munmap(begin, bytes + slack) == 0 ? reason : errno);
    errno = reason;
    return nullptr;
  }
  if (tail > 0 && ::munmap(data + bytes, tail) != 0) {
    const int reason = errno;
    note_refusal(::munmap(data, bytes + tail) == 0 ? reason : errno);
    errno = reason;
    return nullptr;
  }
  return data;
}

bool OsPages::unmap(std::byte* data, std::size_t bytes) noexcept {
  if (in_child() || ::munmap(data, bytes) == 0) {
    return true;
  }
  note_refusal(errno);
  return false;
}

bool OsPages::discard(std::byte* data, std::size_t bytes) noexcept {
  if (in_child() || ::madvise(data, bytes, discard_advice_) == 0) {
    return true;
  }
  note_refusal(errno);
  return false;
}

void OsPages::advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept {
  if (sizes_.huge == 0 || in_child()) {
    return;
  }
  const std::size_t head = (sizes_.huge - address_of(data) % sizes_.huge) % sizes_.huge;
  if (used < head + sizes_.huge) {
    return;  // not one whole huge page: the kernel's default stays
  }
  const std::size_t whole = (used - head) / sizes_.huge * sizes_.huge;
  const std::size_t tail = mapped - head - whole;
  if (::madvise(data + head, whole, MADV_HUGEPAGE) != 0) {
    note_refusal(errno);
    return;
  }
  if (tail > 0 && ::madvise(data + head + whole, tail, MADV_NOHUGEPAGE) != 0) {
    note_refusal(errno);
  }
}

void OsPages::make_resident(std::byte* data, std::size_t bytes) noexcept {
  const std::size_t num_pieces = (bytes + kPopulatedAtOnce - 1) / kPopulatedAtOnce;
  const std::size_t num_threads = std::min(
      {num_pieces, std::size_t{std::thread::hardware_concurrency()}, kMostPopulatingThreads});
  if (num_threads < 2 || in_child()) {
    return;
  }
  std::atomic<std::size_t> next{0};
  const auto populate = [&] {
    for (std::size_t piece = next++; piece < num_pieces; piece = next++) {
      const std::size_t begin = piece * kPopulatedAtOnce;
      if (::madvise(data + begin, std::min(kPopulatedAtOnce, bytes - begin), kPopulateWrite) != 0) {
        return;
      }
    }
  };
  std::vector<std::jthread> helpers;
  try {
    helpers.reserve(num_threads - 1);
    while (helpers.size() < num_threads - 1) {
      helpers.emplace_back(populate);
    }
  } catch (const std::exception&) {
    // Those that are there, and this thread, do it.
  }
  populate();
}

void OsPages::withhold_from_children(std::byte* data, std::size_t bytes) noexcept {
  advise(data, bytes, MADV_DONTFORK);
}

void OsPages::share_with_children(std::byte* data, std::size_t bytes) noexcept {
  advise(data, bytes, MADV_DOFORK);
}

void OsPages::advise(std::byte* data, std::size_t bytes, int advice) noexcept {
  if (!in_child() && ::madvise(data, bytes, advice) != 0) {
    note_refusal(errno);
  }
}

std::string OsPages::description() const {
  std::string text = "mmap, ";
  text += sizes_.huge == 0 ? "no huge pages in this kernel"
                           : "huge pages of " + format_bytes(sizes_.huge) + " advised";
  if (const std::size_t refusals = num_refusals_.load(std::memory_order_relaxed); refusals > 0) {
    text += ", " + std::to_string(refusals) + " call(s) refused (last: " +
            std::generic_category().message(last_refusal_.load(std::memory_order_relaxed)) + ")";
  }
  return text;
}

void OsPages::note_refusal(int error_number) noexcept {
  last_refusal_.store(error_number, std::memory_order_relaxed);
  num_refusals_.fetch_add(1, std::memory_order_relaxed);
}

void discard_whole_pages(PageSource& pages, std::byte* data, std::size_t bytes) noexcept {
  if (const auto whole = whole_pages(data, bytes); !whole.empty()) {
    static_cast<void>(pages.discard(whole.data(), whole.size()));
  }
}

void withhold_whole_pages(PageSource& pages, std::byte* data, std::size_t bytes) noexcept {
  if (const auto whole = whole_pages(data, bytes); !whole.empty()) {
    pages.withhold_from_children(whole.data(), whole.size());
  }
}

void share_whole_pages(PageSource& pages, std::byte* data, std::size_t bytes) noexcept {
  if (const auto whole = whole_pages(data, bytes); !whole.empty()) {
    pages.share_with_children(whole.data(), whole.size());
  }
}

void throw_refused(std::size_t bytes, const std::string& who_refused) {
  const std::size_t page = system_value(_SC_PAGESIZE);
  throw OutOfMemory(TierKind::kHost, bytes, system_value(_SC_AVPHYS_PAGES) * page,
                    system_value(_SC_PHYS_PAGES) * page,
                    who_refused +
                        " (figures: this machine's free and installed memory). Lower the budget, "
                        "or raise the limit that refused: ulimit -v, the container's memory limit, "
                        "vm.overcommit_memory or vm.max_map_count");
}

}  // namespace castor
