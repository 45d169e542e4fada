#include "store/activation_pages.h"

#include <algorithm>

namespace castor {

ActivationPages::ActivationPages(ChunkStream& stream, std::size_t num_pages) : stream_(stream) {
  const MutexLock lock(mutex_);
  for (std::size_t page = num_pages; page > 0; --page) {
    free_.push_back(page - 1);
  }
}

std::optional<ActivationPages::Pages> ActivationPages::try_take(std::size_t bytes) {
  const auto count = static_cast<std::ptrdiff_t>((bytes + kPageBytes - 1) / kPageBytes);
  const MutexLock lock(mutex_);
  if (std::ssize(free_) < count) {
    return std::nullopt;
  }
  Pages pages(free_.end() - count, free_.end());
  free_.erase(free_.end() - count, free_.end());
  return pages;
}

void ActivationPages::give_back(const Pages& pages) noexcept {
  const MutexLock lock(mutex_);
  free_.insert(free_.end(), pages.begin(), pages.end());  // it has had room for them
}

std::span<std::byte> ActivationPages::part(std::span<std::byte> page, std::size_t offset,
                                           std::size_t bytes) {
  return page.first(std::min(kPageBytes, bytes - offset));
}

void ActivationPages::write(const Pages& pages, std::size_t bytes, const Copy& fill) {
  std::size_t offset = 0;
  for (const std::size_t page : pages) {
    stream_.discard(page);  // else what it holds would be read first
    stream_.use(page, StreamAccess::kUpdate,
                [&](auto payloads) { fill(offset, part(payloads.front(), offset, bytes)); });
    offset += kPageBytes;
  }
}

void ActivationPages::read(const Pages& pages, std::size_t bytes, const Copy& take) {
  announce(pages);
  std::size_t offset = 0;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    stream_.use(pages[i], StreamAccess::kRead,
                [&](auto payloads) { take(offset, part(payloads.front(), offset, bytes)); });
    if (const std::size_t next = i + stream_.max_ahead(); next < pages.size()) {
      stream_.prefetch(pages[next]);
    }
    offset += kPageBytes;
  }
}

void ActivationPages::announce(const Pages& pages) {
  const std::size_t ahead = std::min(pages.size(), stream_.max_ahead());
  for (std::size_t i = 0; i < ahead; ++i) {
    stream_.prefetch(pages[i]);
  }
}

std::size_t ActivationPages::free_bytes() const {
  const MutexLock lock(mutex_);
  return free_.size() * kPageBytes;
}

}  // namespace castor
