#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "host/page_source.h"

namespace castor {

/// Memory of the host that is used now and then. In between it is the kernel's to take where
/// somebody needs it, and costs no page faults where nobody did. Processes that this one forks do
/// not get it. Not thread-safe.
class ReusedPages {
 public:
  /// nullptr where the kernel refuses; `bytes` > 0.
  [[nodiscard]] static std::unique_ptr<ReusedPages> map(std::shared_ptr<OsPages> pages,
                                                        std::size_t bytes);
  ~ReusedPages();
  ReusedPages(const ReusedPages&) = delete;
  ReusedPages& operator=(const ReusedPages&) = delete;

  /// On a page boundary; contents unspecified after let_go().
  [[nodiscard]] std::byte* data() const noexcept { return memory_.data(); }
  /// What was asked for, or more.
  [[nodiscard]] std::size_t bytes() const noexcept { return memory_.size(); }
  /// The contents are needed no more.
  void let_go() noexcept { pages_->let_go(memory_.data(), memory_.size()); }

 private:
  ReusedPages(std::shared_ptr<OsPages> pages, std::span<std::byte> memory)
      : pages_(std::move(pages)), memory_(memory) {}

  const std::shared_ptr<OsPages> pages_;
  const std::span<std::byte> memory_;
};

}  // namespace castor
