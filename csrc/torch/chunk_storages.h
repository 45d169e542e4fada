#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_manager.h"
#include "core/mutex.h"
#include "torch/storage_writes.h"

namespace castor {

[[nodiscard]] at::ScalarType to_torch(ScalarType type);

/// What torch counts writes to a tensor, and to every alias of it, with.
[[nodiscard]] std::uint32_t version_of(const at::Tensor& tensor);

/// How a parameter's elements lie in its place in a chunk. Dense layouts keep their strides.
struct ParamGeometry {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

[[nodiscard]] ParamGeometry geometry_of(const at::Tensor& tensor);

/// A tensor over bytes of a device that are not castor's to give away: it borrows them.
[[nodiscard]] at::Tensor bytes_at(const std::byte* data, std::size_t bytes, c10::Device device);

/// Copies on torch's intra-op threads, by the kernel of the CPU, below all that a user may have put
/// between: no autograd graph, dispatch mode or profiler sees it. The spans are of one size and do
/// not overlap.
void copy_on_cpu(std::span<const std::byte> source, std::byte* target);

/// A tensor over `storage` from element `offset`, with a version counter of its own.
[[nodiscard]] at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType type,
                                     std::size_t offset, const ParamGeometry& geometry);

/// Whether that is the tensor's storage; a tensor may have none.
[[nodiscard]] bool lies_over(const at::Tensor& tensor, const c10::Storage& storage) noexcept;

/// Whether the tensor is all of the storage, and its elements are of that type and lie so.
[[nodiscard]] bool lies_over(const at::Tensor& tensor, const c10::Storage& storage,
                             at::ScalarType type, const ParamGeometry& geometry) noexcept;

/// Has the tensor lie over all of a storage, with elements of the type that it has. Its version
/// counter, and what autograd knows of it, stay.
void lay_over(const at::Tensor& tensor, const c10::Storage& storage, const ParamGeometry& geometry);

/// Whether the storage has memory that others than castor have given it (by share_memory_()).
[[nodiscard]] bool has_other_memory(const c10::Storage& storage) noexcept;

/// Whether the storage is in memory of torch's for several processes.
[[nodiscard]] bool is_shared_by_processes(const c10::Storage& storage) noexcept;
/// Whether it is a mapped file of which the process has its own pages.
[[nodiscard]] bool is_mapped_privately(const c10::Storage& storage) noexcept;

/// Makes a storage that castor had lent memory an ordinary one of torch's: it gets the memory of
/// `tensor`, which holds its bytes, and nothing else does.
void give_memory(const c10::Storage& storage, at::Tensor tensor) noexcept;

/// A storage of this size that points nowhere.
[[nodiscard]] c10::Storage empty_storage(std::size_t bytes, c10::Device device = c10::kCPU);

/// A storage of the same size that points where `storage` does; torch throws alike where it is
/// asked for the address.
[[nodiscard]] c10::Storage twin_of(const c10::Storage& storage);

/// Points a storage, and so every tensor over it, at memory that others own.
void point(const c10::Storage& storage, std::byte* address) noexcept;

/// From now on torch throws `message` where it is asked for the storage's address, whenever the
/// storage points nowhere.
void forbid_null(const c10::Storage& storage, std::string message);

/// From now on torch throws `message` where it is asked for the storage's address.
void forbid(const c10::Storage& storage, std::string message);

/// Until allow(), torch throws where it is asked for the storage's address: an update of its bytes
/// is under way. No effect where torch throws already.
void forbid_while_updated(const c10::Storage& storage);
void allow(const c10::Storage& storage) noexcept;

/// A storage over `bytes` of a payload, from `offset` on, that keeps the payload alive, and follows
/// it where it moves. `device`: where torch's operators run on it, wherever its bytes are.
[[nodiscard]] c10::Storage storage_over(std::shared_ptr<Payload> payload, std::size_t offset,
                                        std::size_t bytes, c10::Device device = c10::kCPU);
/// ... over all of it.
[[nodiscard]] c10::Storage storage_over(std::shared_ptr<Payload> payload,
                                        c10::Device device = c10::kCPU);

/// One torch storage per parameter, over its bytes of the chunk and no others, so that whoever
/// saves or copies a tensor by its storage takes that parameter. Moving a chunk is rebinding the
/// storages of its parameters, and every alias follows (the Parameter, tied weights, a state_dict,
/// views that autograd saved). While the runtime lives, storages borrow the memory they point at;
/// release_to_homes hands each its place in the home for good.
/// Owned by the session; guarded by the runtime's mutex once training runs.
class ChunkStorages final : public ParamBinder {
 public:
  /// Makes the storages, of `device`, pointing nowhere until bind.
  ChunkStorages(const ChunkLayout& layout, c10::Device device);

  /// From now on writes are seen, by whoever they come: to these, the parameters in ParamId order,
  /// and to whatever else lies over their storages.
  void watch(std::span<const at::Tensor> params);
  using WriteBack = std::function<void(ChunkId, const std::byte* home, const std::byte* slot)>;
  /// Who is told before user writes on the device overwrite a home; see ParamBinder.
  void on_write_back(WriteBack callback) { on_write_back_ = std::move(callback); }
  [[nodiscard]] const c10::Storage& storage(ParamId param) const { return storages_[index(param)]; }
  /// A new storage takes the place of the parameter's, where that points. Returns the old one,
  /// which points there as well, and is followed no longer.
  c10::Storage renew(ParamId param);
  /// Renews with `storage`, an ordinary one of torch's of the parameter's size: whatever
  /// else lies over it follows the parameter from now on. Its memory goes. Of the tensors over it
  /// none is known, nor the version counters that their writes count in: see distrust().
  void adopt(ParamId param, const c10::Storage& storage);
  /// While the parameter's storage has more than `uses` references, anybody may have written it.
  void distrust(ParamId param, std::size_t uses);
  /// The parameter was written by an operator that counted nothing.
  void note_write(ParamId param) noexcept;
  /// Those of the chunk's parameters, in no particular order.
  void for_each(ChunkId chunk, const std::function<void(const c10::Storage&)>& use) const;

  void bind(ChunkId chunk, std::byte* address) noexcept override { point_at(chunk, address); }
  /// What bind does: `address` is the chunk's, or nullptr for nowhere.
  void point_at(ChunkId chunk, std::byte* address) const noexcept;
  void copy_on_device(std::span<const std::byte> source, std::byte* target) override;
  void snapshot(ChunkId chunk) noexcept override;
  [[nodiscard]] bool written_since_snapshot(ChunkId chunk) const noexcept override;
  void before_write_back(ChunkId chunk, const std::byte* home, const std::byte* slot) override {
    if (on_write_back_) {
      on_write_back_(chunk, home, slot);
    }
  }

  /// After the chunk manager is gone: binds each storage to its home and lets it own that memory.
  void release_to_homes(const std::vector<std::shared_ptr<Payload>>& homes);

 private:
  [[nodiscard]] std::size_t byte_offset(ParamId param) const noexcept;

  const ChunkLayout& layout_;
  const c10::Device device_;
  void take_place(ParamId param, c10::Storage storage);

  mutable Mutex mutex_;  // whoever moves a chunk points its storages, from any thread
  std::vector<c10::Storage> storages_;                  // per parameter; written under the mutex
  std::vector<std::unique_ptr<StorageWrites>> writes_;  // per chunk; empty before watch()
  WriteBack on_write_back_;
};

}  // namespace castor
