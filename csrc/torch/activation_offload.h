#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/memory_tier.h"
#include "core/mutex.h"
#include "torch/activation_pages.h"
#include "torch/chunk_storages.h"
#include "torch/session.h"

namespace castor {

/// Activations of a model's blocks that wait for backward in host memory (docs/design/0030).
///
/// What autograd saves during a block's forward leaves the device when the next block begins. Where
/// copies run beside the compute, it stays until the block after that begins, and comes back while
/// the backward of the block behind it runs: what the device holds does not depend on how fast the
/// link is, only how long anybody waits. The last block's is never copied.
///
/// What the host has no room for goes on to NVMe, where the session has pages for it: copied at
/// once, written beside what follows, and read ahead of its block's backward.
///
/// Whoever else holds a tensor keeps its memory on the device, and backward reads it there. Views
/// of one storage leave as one. Thread-safe. Owns a share of the session, and so do the tensors
/// that it gives out: a graph may outlive the model.
class ActivationOffload : public std::enable_shared_from_this<ActivationOffload> {
 private:
  struct Moved;

 public:
  /// One forward of a block.
  class Pass {
    friend class ActivationOffload;
    std::weak_ptr<Pass> previous_;
    std::vector<std::weak_ptr<Moved>> moved_;
    // Of those that have not left.
    std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Moved>> by_storage_;
  };
  /// What autograd keeps of a tensor.
  class Saved {
    friend class ActivationOffload;
    std::shared_ptr<Pass> pass_;
    std::shared_ptr<Moved> moved_;  // nullptr: the tensor stayed
    at::Tensor kept_;
    at::ScalarType type_ = at::kFloat;
    std::size_t offset_ = 0;  // elements
    ParamGeometry geometry_;
    c10::VariableVersion counter_;
    std::uint32_t version_ = 0;
  };

  /// Bytes now, and of the whole run.
  struct Figures {
    std::size_t ready_host_bytes = 0;   ///< of the host, that the next activations may take
    std::size_t ready_nvme_bytes = 0;   ///< of pages on NVMe; a tensor takes whole ones
    std::uint64_t bytes_offloaded = 0;  ///< copied there so far
  };

  explicit ActivationOffload(std::shared_ptr<Session> session);

  /// A block's forward begins: what was saved before it leaves. Throws OutOfMemory of the host or
  /// of NVMe, and what ChunkStream does.
  [[nodiscard]] std::shared_ptr<Pass> begin();
  /// What autograd keeps of a tensor that an operator of the pass saves. Parameters, tensors of
  /// another device and small ones stay as they are; but their versions are checked as well.
  [[nodiscard]] std::shared_ptr<Saved> save(const std::shared_ptr<Pass>& pass,
                                            const at::Tensor& tensor);
  /// The tensor, for backward; on the device. Throws UsageError where it was written in place since
  /// it was saved, OutOfMemory where it does not fit, and what ChunkStream does.
  [[nodiscard]] at::Tensor restore(const Saved& saved);

  [[nodiscard]] Figures figures() const;

 private:
  using Dropped = std::vector<c10::Storage>;  // freed without the mutex: Python may know them

  /// Calls `function` with what is still needed of a pass.
  template <typename Function>
  static void for_each(const Pass& pass, Function&& function);
  void send(Pass& pass);
  void let_go(Pass& pass, Dropped& dropped);
  void fetch(Moved& moved);
  void announce_next(const Pass& pass);
  void fetch_ahead(Pass& pass);
  void read(Moved& moved, const c10::Storage& storage);
  [[nodiscard]] Block home(std::size_t bytes);
  void write(Moved& moved);
  void forget(Moved& moved) noexcept;

  const std::shared_ptr<Session> session_;
  std::optional<ActivationPages> pages_;  // nullopt: none on NVMe
  Mutex mutex_;                           // guards passes, and what they moved, too
  // Its forward runs, or was the last to; on its way to the host; restored from last.
  std::weak_ptr<Pass> latest_ CASTOR_GUARDED_BY(mutex_);
  std::weak_ptr<Pass> leaving_ CASTOR_GUARDED_BY(mutex_);
  std::weak_ptr<Pass> in_backward_ CASTOR_GUARDED_BY(mutex_);
  mutable Mutex homes_mutex_;  // a leaf, taken where graphs are dropped
  // By size: the next step needs the same ones.
  std::multimap<std::size_t, Block> free_homes_ CASTOR_GUARDED_BY(homes_mutex_);
  std::uint64_t bytes_offloaded_ CASTOR_GUARDED_BY(homes_mutex_) = 0;
};

}  // namespace castor
