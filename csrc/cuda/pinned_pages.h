#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "core/mutex.h"
#include "core/page_source.h"

namespace castor::cuda {

/// Registers pages with CUDA until the returned object goes: pages of a mapping that several
/// processes have may be registered by each of them. `device`: as for PinnedPages. Throws CudaError
/// where CUDA, or the system, refuses.
[[nodiscard]] std::shared_ptr<void> lock_pages(std::span<std::byte> pages, int device);

/// Adaptor that registers the pages of another source with CUDA. Copies to and from registered
/// pages need no staging and overlap with computation; kernels of every device read and write them
/// at their host address (unified virtual addressing). Registered pages are resident at once and
/// never swapped, so exactly the bytes that map() was asked for are registered. The adaptor belongs
/// on top of a source that binds to a NUMA node: registering touches the pages.
///
/// Three rules follow from registration:
/// - discard() refuses: the device would keep the old physical pages, and the host see new ones.
/// - Forked processes never get the pages. With a child that shares them, the host's next write
///   goes to a copy, and the device keeps the old page. In Linux from 5.12 on, each fork may copy
///   all registered pages instead.
/// - A part of what one map() gave cannot be unregistered. unmap() of a part succeeds, and its
///   pages stay until the rest of them is unmapped too (held_bytes()).
///
/// Registration can be refused: RLIMIT_MEMLOCK, a container, too little free memory. map() then
/// returns nullptr (errno ENOMEM), and description() has CUDA's reason. Thread-safe.
class PinnedPages final : public PageSource {
 public:
  /// `device` may be any one: where none is initialised yet, registering initialises this one.
  PinnedPages(std::unique_ptr<PageSource> upstream, int device);
  ~PinnedPages() override;

  [[nodiscard]] std::byte* map(std::size_t bytes, std::size_t alignment) noexcept override;
  [[nodiscard]] bool unmap(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] bool discard(std::byte* data, std::size_t bytes) noexcept override;
  /// Does nothing: huge pages have to be asked for before the pages exist, and map() does that.
  void advise_huge(std::byte* data, std::size_t used, std::size_t mapped) noexcept override;
  /// Does nothing: registered pages are resident.
  void make_resident(std::byte* data, std::size_t bytes) noexcept override;
  /// Does nothing: map() withholds the pages.
  void withhold_from_children(std::byte* data, std::size_t bytes) noexcept override;
  /// Does nothing: the pages stay withheld as long as they are registered.
  void share_with_children(std::byte* data, std::size_t bytes) noexcept override;
  [[nodiscard]] std::string description() const override;

  /// Returns the bytes that are registered now.
  [[nodiscard]] std::size_t registered_bytes() const;
  /// Returns those of the registered bytes that are unmapped and wait for the rest of what was
  /// registered with them.
  [[nodiscard]] std::size_t held_bytes() const;

 private:
  struct Registration {
    std::size_t bytes = 0;
    std::size_t live_bytes = 0;  // not unmapped yet
  };
  using Registrations = std::map<std::byte*, Registration>;

  [[nodiscard]] bool add(std::byte* data, std::size_t bytes) noexcept;
  void remove(std::byte* data, std::size_t bytes) noexcept;

  const std::unique_ptr<PageSource> upstream_;
  const int device_;
  mutable Mutex mutex_;
  Registrations registrations_ CASTOR_GUARDED_BY(mutex_);  // they do not overlap
  // Relaxed: figures for reports.
  std::atomic<std::size_t> num_refusals_{0};
  std::atomic<std::size_t> stuck_bytes_{0};
  std::atomic<cudaError_t> last_refusal_{cudaSuccess};
};

}  // namespace castor::cuda
