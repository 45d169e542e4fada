#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "host/page_source.h"

namespace castor::testing {

/// What a test sees of, and does to, the pages under an arena. Shared by the test and the source,
/// which its arena owns. Thread-safe.
struct PageControls {
  static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

  std::atomic<std::size_t> num_maps{0};
  std::atomic<std::size_t> live_bytes{0};
  std::atomic<std::size_t> num_discards{0};
  /// That make_resident() was called for.
  std::atomic<std::size_t> resident_bytes{0};
  /// The 1-based call of map() that is refused.
  std::atomic<std::size_t> refuse_map_call{kNever};
  /// map() refuses what would take live_bytes beyond this.
  std::atomic<std::size_t> limit_bytes{kNever};
  std::atomic<bool> refuse_unmap{false};
};

/// Adversary: the operating system's pages, refused where the controls say so.
class AdversaryPages final : public PageSource {
 public:
  explicit AdversaryPages(std::shared_ptr<PageControls> controls)
      : controls_(std::move(controls)) {}

  ~AdversaryPages() override {
    for (const auto& [data, bytes] : refused_unmaps_) {
      (void)os_.unmap(data, bytes);
    }
  }

  std::byte* map(std::size_t bytes, std::size_t alignment) noexcept override {
    const std::size_t call = controls_->num_maps.fetch_add(1) + 1;
    const std::size_t before = controls_->live_bytes.fetch_add(bytes);
    std::byte* data = nullptr;
    if (call != controls_->refuse_map_call && before <= controls_->limit_bytes &&
        bytes <= controls_->limit_bytes - before) {
      data = os_.map(bytes, alignment);
    } else {
      errno = ENOMEM;
    }
    if (data == nullptr) {
      controls_->live_bytes.fetch_sub(bytes);
    }
    return data;
  }

  bool unmap(std::byte* data, std::size_t bytes) noexcept override {
    if (controls_->refuse_unmap) {
      const std::lock_guard lock(mutex_);
      refused_unmaps_.emplace_back(data, bytes);
      return false;
    }
    controls_->live_bytes.fetch_sub(bytes);
    return os_.unmap(data, bytes);
  }

  bool discard(std::byte* data, std::size_t bytes) noexcept override {
    controls_->num_discards.fetch_add(1);
    return os_.discard(data, bytes);
  }

  void advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept override {
    os_.advise_huge(data, used, mapped);
  }

  void make_resident(std::byte* data, std::size_t bytes) noexcept override {
    os_.make_resident(data, bytes);
    controls_->resident_bytes.fetch_add(bytes);
  }

  void withhold_from_children(std::byte* data, std::size_t bytes) noexcept override {
    os_.withhold_from_children(data, bytes);
  }

  void share_with_children(std::byte* data, std::size_t bytes) noexcept override {
    os_.share_with_children(data, bytes);
  }

  std::string description() const override { return "adversary over " + os_.description(); }

 private:
  OsPages os_;
  const std::shared_ptr<PageControls> controls_;
  std::mutex mutex_;
  std::vector<std::pair<std::byte*, std::size_t>> refused_unmaps_;  // guarded by mutex_
};

}  // namespace castor::testing
