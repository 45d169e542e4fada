#pragma once

#include <atomic>
#include <cstddef>
#include <string>

#include "core/page_source.h"

namespace castor {

/// Page sizes of this machine, in bytes.
struct PageSizes {
  std::size_t page = 0;
  /// Size of a transparent huge page; 0 where the kernel has none.
  std::size_t huge = 0;
};

[[nodiscard]] PageSizes system_page_sizes();

/// Private anonymous mappings of the operating system. Owns no memory: the arenas do. In a forked
/// child this source changes no mapping: withheld pages are missing there, and something else may
/// be in their place.
class OsPages final : public PageSource {
 public:
  /// Ways to give back the physical memory of discarded pages.
  enum class Discard {
    kAtOnce,
    /// The kernel takes the memory when somebody needs it, until the pages are written again. Pages
    /// that the kernel has left cost no page faults then. Their contents are unspecified, not zero.
    kWhereNeeded,
  };

  explicit OsPages(Discard discard = Discard::kAtOnce);

  [[nodiscard]] std::byte* map(std::size_t bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] bool unmap(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] bool discard(std::byte* data, std::size_t bytes) noexcept override;
  void advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept override;
  void make_resident(std::byte* data, std::size_t bytes) noexcept override;
  void withhold_from_children(std::byte* data, std::size_t bytes) noexcept override;
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] std::string description() const override;

 private:
  [[nodiscard]] bool in_child() const noexcept;
  void advise(std::byte* data, std::size_t bytes, int advice) noexcept;
  void note_refusal(int error_number) noexcept;

  const int discard_advice_;
  const int process_;  // process that made this source
  const PageSizes sizes_;
  // Relaxed: figures for reports, they order nothing.
  std::atomic<std::size_t> num_refusals_{0};
  std::atomic<int> last_refusal_{0};
};

/// Gives back the physical memory of the pages that lie wholly in [data, data + bytes). Pages that
/// the source refuses to give back (pinned pages) stay.
void discard_whole_pages(PageSource& pages, std::byte* data, std::size_t bytes) noexcept;

/// Calls PageSource::withhold_from_children, or share_with_children, for the pages that lie wholly
/// in these bytes: another owner of a part of a page must not lose that page.
void withhold_whole_pages(PageSource& pages, std::byte* data, std::size_t bytes) noexcept;
void share_whole_pages(PageSource& pages, std::byte* data, std::size_t bytes) noexcept;

/// Throws the error of every host arena when the operating system refuses `bytes`. Its figures are
/// those of the machine: free physical memory as `available`, installed memory as `budget`.
[[noreturn]] void throw_refused(std::size_t bytes, const std::string& who_refused);

}  // namespace castor
