#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/host_blocks.h"
#include "core/memory_tier.h"
#include "core/mutex.h"
#include "store/activation_pages.h"
#include "torch/chunk_storages.h"
#include "torch/session.h"

namespace castor {

/// Store of the activations of a model's blocks that wait for backward in host memory
/// (docs/design/0030).
///
/// Tensors that a block's forward saves for backward leave the device when the next block begins.
/// If copies run beside the compute, the tensors stay until the block after that begins, and come
/// back while backward of the following block runs. So the bytes on the device do not depend on the
/// speed of the link; only the waits do. Activations of the last block are never copied.
///
/// Activations that the host has no room for go on to NVMe, if the session has pages there. They
/// are copied off the device at once, written in the background, and read ahead of their block's
/// backward.
///
/// A tensor that somebody else holds keeps its memory on the device, and backward reads it there.
/// Views of one storage leave together, as one storage. Thread-safe. This object owns a share of
/// the session and is owned by the tensors that it saved: a graph may outlive the model.
class ActivationOffload : public std::enable_shared_from_this<ActivationOffload> {
 private:
  struct Moved;

 public:
  /// Forward pass of one block.
  class Pass {
    friend class ActivationOffload;
    std::weak_ptr<Pass> previous_;
    std::vector<std::weak_ptr<Moved>> moved_;
    // Storages of the pass that have not left the device.
    std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Moved>> by_storage_;
  };
  /// Record that autograd saves for backward in place of a tensor.
  class Saved {
    friend class ActivationOffload;
    std::shared_ptr<Pass> pass_;
    std::shared_ptr<Moved> moved_;  // nullptr: the tensor stays where it is
    at::Tensor kept_;
    at::ScalarType type_ = at::kFloat;
    std::size_t offset_ = 0;  // elements
    ParamGeometry geometry_;
    c10::VariableVersion counter_;
    std::uint32_t version_ = 0;
  };

  /// Byte counts: of the room that is free now, and of the full run.
  struct Figures {
    std::size_t ready_host_bytes = 0;  ///< bytes of free host buffers for the next activations
    std::size_t ready_nvme_bytes = 0;  ///< bytes of free pages on NVMe; no two tensors share a page
    std::uint64_t bytes_offloaded = 0;  ///< bytes copied to the host or to NVMe so far
  };

  explicit ActivationOffload(std::shared_ptr<Session> session);

  /// Begins a block's forward: tensors that the blocks before have saved leave the device. Throws
  /// OutOfMemory of the host or of NVMe, and what ChunkStream throws.
  [[nodiscard]] std::shared_ptr<Pass> begin();
  /// Returns what autograd keeps of a tensor that an operator of the pass saves for backward.
  /// Parameters, tensors of another device and small tensors stay as they are, but their versions
  /// are checked as well.
  [[nodiscard]] std::shared_ptr<Saved> save(const std::shared_ptr<Pass>& pass,
                                            const at::Tensor& tensor);
  /// Returns the tensor on the device, for backward. Throws UsageError where the tensor was written
  /// in place since it was saved, OutOfMemory where it does not fit, and what ChunkStream throws.
  [[nodiscard]] at::Tensor restore(const Saved& saved);

  [[nodiscard]] Figures figures() const;

 private:
  using Dropped = std::vector<c10::Storage>;  // freed without the mutex: Python may know them

  /// Calls `function` for each storage of a pass that is still needed.
  template <typename Function>
  static void for_each(const Pass& pass, Function&& function);
  void send(Pass& pass);
  void let_go(Pass& pass, Dropped& dropped);
  void fetch(Moved& moved);
  void announce_next(const Pass& pass);
  void fetch_ahead(Pass& pass);
  void read(Moved& moved, const c10::Storage& storage);
  void write(Moved& moved);
  void forget(Moved& moved) noexcept;

  const std::shared_ptr<Session> session_;
  std::optional<ActivationPages> pages_;  // nullopt: there are none
  Mutex mutex_;                           // also guards passes and the storages that they moved
  // Pass whose forward runs, or was the last to run; pass on its way to the host; pass that a
  // tensor was restored from last.
  std::weak_ptr<Pass> latest_ CASTOR_GUARDED_BY(mutex_);
  std::weak_ptr<Pass> leaving_ CASTOR_GUARDED_BY(mutex_);
  std::weak_ptr<Pass> in_backward_ CASTOR_GUARDED_BY(mutex_);
  HostBlocks host_blocks_;
  std::atomic<std::uint64_t> bytes_offloaded_ = 0;
};

}  // namespace castor
