#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/copy_engine.h"
#include "core/host_blocks.h"
#include "core/mutex.h"
#include "store/activation_pages.h"
#include "store/device_memory.h"
#include "store/session_memory.h"

namespace castor {

/// Store of the activations of a model's blocks that wait for backward in host memory
/// (docs/design/0030).
///
/// Memory that a block's forward saves for backward leaves the device when the next block begins.
/// If copies run beside the compute, it stays until the block after that begins, and comes back
/// while backward of the following block runs. So the bytes on the device do not depend on the
/// speed of the link; only the waits do. Activations of the last block are never copied.
///
/// Activations that the host has no room for go on to NVMe, if the session has pages there. They
/// are copied off the device at once, written in the background, and read ahead of their block's
/// backward.
///
/// Memory that somebody else holds stays on the device, and backward reads it there. Thread-safe.
/// Owned by what it keeps (Kept): a graph may outlive the model.
class ActivationStore : public std::enable_shared_from_this<ActivationStore> {
 public:
  /// Parts of the session that the store uses; `owner` keeps them alive.
  struct Parts {
    std::shared_ptr<void> owner;
    const SessionMemory& memory;
    CopyEngine& copies;
    TakeDeviceMemory take;
  };
  /// Memory as the model has it, which the store does not keep alive.
  class Original {
   public:
    virtual ~Original() = default;
    /// Returns nullptr where the memory is freed.
    [[nodiscard]] virtual std::shared_ptr<DeviceMemory> lock() const = 0;
    [[nodiscard]] virtual bool expired() const noexcept = 0;
  };
  class Kept;
  /// Forward pass of one block.
  class Pass {
    friend class ActivationStore;
    std::weak_ptr<Pass> previous_;
    std::vector<std::weak_ptr<Kept>> kept_;
    // By the identity of memory that has not left the device.
    std::unordered_map<const void*, std::weak_ptr<Kept>> by_identity_;
  };
  /// Byte counts: of the room that is free now, and of the full run.
  struct Figures {
    std::size_t ready_host_bytes = 0;  ///< bytes of free host buffers for the next activations
    std::size_t ready_nvme_bytes = 0;  ///< bytes of free pages on NVMe; no two tensors share a page
    std::uint64_t bytes_offloaded = 0;  ///< bytes copied to the host or to NVMe so far
  };

  explicit ActivationStore(Parts parts);

  /// Begins a block's forward: what the blocks before have saved leaves the device. Throws
  /// OutOfMemory of the host or of NVMe, and what ChunkStream throws.
  [[nodiscard]] std::shared_ptr<Pass> begin();
  /// Keeps memory of the pass for backward. Memory of the same `identity` is kept once. `original`
  /// makes the store's reference to the memory, which is there now.
  [[nodiscard]] std::shared_ptr<Kept> keep(
      Pass& pass, const void* identity, const std::function<std::unique_ptr<Original>()>& original);
  /// Returns the memory on the device, for backward. Throws OutOfMemory where it does not fit, and
  /// what ChunkStream throws.
  [[nodiscard]] std::shared_ptr<DeviceMemory> restore(const std::shared_ptr<Pass>& pass,
                                                      Kept& kept);

  [[nodiscard]] Figures figures() const;

 private:
  using Dropped = std::vector<std::shared_ptr<DeviceMemory>>;  // freed without the mutex

  /// Calls `function` for all memory of a pass that is still needed.
  template <typename Function>
  static void for_each(const Pass& pass, Function&& function);
  void send(Pass& pass);
  void let_go(Pass& pass, Dropped& dropped);
  void fetch(Kept& kept);
  void announce_next(const Pass& pass);
  void fetch_ahead(Pass& pass);
  void read(Kept& kept, const DeviceMemory& target);
  void write(Kept& kept);
  void forget(Kept& kept) noexcept;
  [[nodiscard]] CopyTicket copy_out(const Kept& kept, std::size_t offset,
                                    std::span<std::byte> target);
  [[nodiscard]] CopyTicket copy_in(std::span<const std::byte> source, const DeviceMemory& target,
                                   std::size_t offset);

  const Parts parts_;
  std::optional<ActivationPages> pages_;  // nullopt: there are none
  Mutex mutex_;                           // also guards passes and what they keep
  // Pass whose forward runs, or was the last to run; pass on its way to the host; pass that memory
  // was restored for last.
  std::weak_ptr<Pass> latest_ CASTOR_GUARDED_BY(mutex_);
  std::weak_ptr<Pass> leaving_ CASTOR_GUARDED_BY(mutex_);
  std::weak_ptr<Pass> in_backward_ CASTOR_GUARDED_BY(mutex_);
  HostBlocks host_blocks_;
  std::atomic<std::uint64_t> bytes_offloaded_ = 0;
};

}  // namespace castor
