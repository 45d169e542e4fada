#include "host/shared_host_storage.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <unordered_set>

#include "core/error.h"
#include "core/mutex.h"
#include "core/units.h"
#include "host/page_source.h"

namespace castor {
namespace {

// Of an entry of /proc/PID/pagemap (Linux, Documentation/admin-guide/mm/pagemap.rst).
constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;

constexpr bool is_copy(std::uint64_t entry) noexcept {
  return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0;
}

[[noreturn]] void fail(const std::string& what) {
  throw Error(what + " failed: " + std::generic_category().message(errno));
}

std::size_t page_bytes() {
  static const std::size_t bytes = system_page_sizes().page;
  return bytes;
}

}  // namespace

/// The mapping in which what a process writes is seen by all.
struct SharedHostStorage::Common {
  SharedMapping mapping;
  std::size_t bytes = 0;
  std::shared_ptr<void> lock;  // of its pages; destroyed first
};

/// The mapping in which what this process writes is its own; processes that it forks do not get it.
class SharedHostStorage::View {
 public:
  View(int file, std::size_t bytes)
      : bytes_(bytes), process_(::getpid()), file_(::fcntl(file, F_DUPFD_CLOEXEC, 0)) {
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                              file_, /*offset=*/0);
    if (data == MAP_FAILED) {
      close_and_fail("mapping the ranks' host storage");
    }
    data_ = static_cast<std::byte*>(data);
    pages_.withhold_from_children(data_, bytes_);
    page_map_ = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (page_map_ < 0) {
      close_and_fail("opening /proc/self/pagemap");
    }
  }
  ~View() {
    ::close(page_map_);
    ::close(file_);
    if (!in_child()) {
      ::munmap(data_, bytes_);
    }
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

  /// Calls `use` with one run of copied pages after another, of those that have any of these bytes.
  template <typename Use>
  void for_each_copied(std::span<const std::byte> bytes, const Use& use) const {
    const std::size_t page = page_bytes();
    const auto begin = static_cast<std::size_t>(bytes.data() - data_) / page;
    const std::size_t end =
        (static_cast<std::size_t>(bytes.data() - data_) + bytes.size() + page - 1) / page;
    std::array<std::uint64_t, 2048> entries{};
    std::size_t run = begin;  // where the copied pages begin that end with the one before `next`
    for (std::size_t next = begin; next < end;) {
      const std::size_t count = std::min(entries.size(), end - next);
      read_page_map(next, std::span(entries).first(count));
      for (std::size_t i = 0; i < count; ++i, ++next) {
        if (!is_copy(entries[i])) {
          if (run < next) {
            use(std::span(data_ + run * page, (next - run) * page));
          }
          run = next + 1;
        }
      }
    }
    if (run < end) {
      use(std::span(data_ + run * page, (end - run) * page));
    }
  }
  /// The block's pages are gone from this process; the addresses stay taken.
  void unmap(std::byte* block, std::size_t bytes) noexcept {
    if (!in_child()) {
      ::mmap(block, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             /*fd=*/-1, /*offset=*/0);
    }
    const MutexLock lock(mutex_);
    begun_.erase(block);
    children_have_.erase(block);
  }
  void discard(std::byte* block, std::size_t bytes) noexcept {
    static_cast<void>(pages_.discard(block, bytes));
  }
  void share_with_children(std::byte* block, std::size_t bytes) {
    const MutexLock lock(mutex_);
    children_have_.insert(block);
    pages_.share_with_children(block, bytes);
  }
  void begin_copy(std::byte* block, std::size_t bytes) {
    const MutexLock lock(mutex_);
    begun_.insert(block);
    map_at(block, bytes, MAP_ANONYMOUS, /*file=*/-1, "taking memory for a rank's own gradients");
    pages_.advise_huge(block, bytes, bytes);
  }
  /// Whether there was a begun one.
  bool end_copy(std::byte* block, std::size_t bytes) {
    const MutexLock lock(mutex_);
    if (!begun_.contains(block)) {
      return false;
    }
    map_at(block, bytes, /*kind=*/0, file_, "forgetting copies of the ranks' host storage");
    begun_.erase(block);
    return true;
  }

 private:
  // What is withheld is not there, and something else may be.
  [[nodiscard]] bool in_child() const noexcept { return ::getpid() != process_; }
  [[noreturn]] void close_and_fail(const std::string& what) {
    const int reason = errno;
    if (data_ != nullptr) {
      ::munmap(data_, bytes_);
    }
    ::close(file_);
    errno = reason;
    fail(what);
  }
  // Instead of the pages that are there, whose copies go.
  void map_at(std::byte* block, std::size_t bytes, int kind, int file, const char* what)
      CASTOR_REQUIRES(mutex_) {
    if (in_child()) {
      return;
    }
    if (::mmap(block, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED | kind,
               file, file < 0 ? 0 : block - data_) == MAP_FAILED) {
      fail(what);
    }
    if (!children_have_.contains(block)) {
      pages_.withhold_from_children(block, bytes);
    }
  }
  void read_page_map(std::size_t first, std::span<std::uint64_t> entries) const {
    const std::size_t page = reinterpret_cast<std::uintptr_t>(data_) / page_bytes() + first;
    const auto read = ::pread(page_map_, entries.data(), entries.size_bytes(),
                              static_cast<off_t>(page * sizeof(std::uint64_t)));
    if (read != static_cast<ssize_t>(entries.size_bytes())) {
      fail("reading /proc/self/pagemap");
    }
  }

  std::byte* data_ = nullptr;
  const std::size_t bytes_;
  const int process_;  // that made it
  const int file_;
  OsPages pages_;
  int page_map_ = -1;
  Mutex mutex_;
  std::unordered_set<const std::byte*> begun_ CASTOR_GUARDED_BY(mutex_);  // blocks
  std::unordered_set<const std::byte*> children_have_ CASTOR_GUARDED_BY(mutex_);
};

class SharedHostStorage::ViewArena final : public Arena {
 public:
  explicit ViewArena(std::shared_ptr<View> view) : view_(std::move(view)) {}

  [[nodiscard]] std::byte* allocate(std::size_t bytes) override {
    const std::size_t begin = taken_.fetch_add(size_of(bytes));
    if (begin + bytes > view_->bytes()) {
      throw OutOfMemory(TierKind::kHost, bytes, view_->bytes() - std::min(begin, view_->bytes()),
                        view_->bytes(), "the ranks' host storage was made for other chunks");
    }
    return view_->data() + begin;
  }
  // Its place is not handed out again.
  void deallocate(std::byte* data, std::size_t bytes) noexcept override {
    view_->unmap(data, size_of(bytes));
  }
  void discard(std::byte* data, std::size_t bytes) noexcept override {
    view_->discard(data, size_of(bytes));
  }
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override {
    view_->share_with_children(data, size_of(bytes));
  }
  [[nodiscard]] std::string description() const override {
    return "memory that the ranks of this machine share";
  }

 private:
  const std::shared_ptr<View> view_;
  std::atomic<std::size_t> taken_ = 0;
};

class SharedHostStorage::CommonArena final : public Arena {
 public:
  explicit CommonArena(std::shared_ptr<Common> common) : common_(std::move(common)) {}

  [[nodiscard]] std::byte* allocate(std::size_t bytes) override {
    const std::size_t begin = taken_.fetch_add(size_of(bytes));
    if (begin + bytes > common_->bytes) {
      throw OutOfMemory(TierKind::kHost, bytes, common_->bytes - std::min(begin, common_->bytes),
                        common_->bytes, "the ranks' host storage was made for other chunks");
    }
    return common_->mapping.data() + begin;
  }
  // Its place is not handed out again.
  void deallocate(std::byte* /*data*/, std::size_t /*bytes*/) noexcept override {}
  [[nodiscard]] bool shared_by_processes() const noexcept override { return true; }
  [[nodiscard]] std::string description() const override {
    return "memory that the ranks of this machine share, page-locked";
  }

 private:
  const std::shared_ptr<Common> common_;
  std::atomic<std::size_t> taken_ = 0;
};

SharedHostStorage::SharedHostStorage(int file, std::size_t bytes)
    : common_(std::make_shared<Common>(
          Common{.mapping = SharedMapping(file, bytes), .bytes = bytes, .lock = nullptr})),
      view_(std::make_shared<View>(file, bytes)) {
  if (common_->mapping.data() == nullptr) {
    fail("mapping the ranks' host storage");
  }
}

SharedHostStorage::SharedHostStorage(int file, std::size_t bytes, const LockPages& lock_pages)
    : common_(std::make_shared<Common>(
          Common{.mapping = SharedMapping(file, bytes), .bytes = bytes, .lock = nullptr})) {
  if (common_->mapping.data() == nullptr) {
    fail("mapping the ranks' host storage");
  }
  common_->lock = lock_pages(all());
}

SharedHostStorage::~SharedHostStorage() = default;

std::size_t SharedHostStorage::size_of(std::size_t bytes) { return align_up(bytes, page_bytes()); }

std::unique_ptr<Arena> SharedHostStorage::make_arena() const {
  if (view_ == nullptr) {
    return std::make_unique<CommonArena>(common_);
  }
  return std::make_unique<ViewArena>(view_);
}

std::span<std::byte> SharedHostStorage::all() const noexcept {
  return {common_->mapping.data(), common_->bytes};
}

bool SharedHostStorage::contains(const std::byte* in_view) const noexcept {
  const std::byte* const begin = view_ == nullptr ? common_->mapping.data() : view_->data();
  return in_view >= begin && in_view < begin + common_->bytes;
}

std::byte* SharedHostStorage::common(const std::byte* in_view) const noexcept {
  assert(contains(in_view));
  const std::byte* const begin = view_ == nullptr ? common_->mapping.data() : view_->data();
  return common_->mapping.data() + (in_view - begin);
}

void SharedHostStorage::begin_copy(std::span<std::byte> block) const {
  if (view_ == nullptr) {
    return;
  }
  view_->begin_copy(block.data(), size_of(block.size()));
}

void SharedHostStorage::publish(std::span<const std::byte> bytes) const {
  if (view_ == nullptr) {
    return;
  }
  view_->for_each_copied(bytes, [&](std::span<const std::byte> pages) {
    const std::byte* const begin = std::max(pages.data(), bytes.data());
    const std::byte* const end = std::min(pages.data() + pages.size(), bytes.data() + bytes.size());
    std::memcpy(common(begin), begin, static_cast<std::size_t>(end - begin));
  });
}

void SharedHostStorage::forget_within(std::span<std::byte> bytes) const {
  if (view_ == nullptr) {
    return;
  }
  const std::size_t page = page_bytes();
  const auto first = static_cast<std::size_t>(bytes.data() - view_->data());
  const std::size_t begin = align_up(first, page);
  const std::size_t end = (first + bytes.size()) / page * page;
  if (begin < end) {
    forget({view_->data() + begin, end - begin});
  }
}

void SharedHostStorage::forget(std::span<std::byte> block) const {
  if (view_ == nullptr) {
    return;
  }
  if (view_->end_copy(block.data(), size_of(block.size()))) {
    return;
  }
  view_->for_each_copied(block, [](std::span<std::byte> pages) {
    if (::madvise(pages.data(), pages.size(), MADV_DONTNEED) != 0) {
      fail("forgetting copies of the ranks' host storage");
    }
  });
}

}  // namespace castor
