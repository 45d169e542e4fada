#include "host/reused_pages.h"

#include <utility>

namespace castor {

std::unique_ptr<ReusedPages> ReusedPages::map(std::shared_ptr<OsPages> pages, std::size_t bytes) {
  const PageSizes sizes = system_page_sizes();
  const bool huge = sizes.huge > 0 && bytes >= sizes.huge;
  const std::size_t mapped = (bytes + sizes.page - 1) / sizes.page * sizes.page;
  std::byte* const data = pages->map(mapped, huge ? sizes.huge : sizes.page);
  if (data == nullptr) {
    return nullptr;
  }
  pages->advise_huge(data, bytes, mapped);
  pages->withhold_from_children(data, mapped);
  return std::unique_ptr<ReusedPages>(new ReusedPages(std::move(pages), {data, mapped}));
}

ReusedPages::~ReusedPages() {
  // What cannot be unmapped stays mapped, and the kernel's to take.
  if (!pages_->unmap(memory_.data(), memory_.size())) {
    let_go();
  }
}

}  // namespace castor
