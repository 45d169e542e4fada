#pragma once

#include <ATen/core/DimVector.h>
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
#include "store/address_follower.h"
#include "torch/param_storages.h"
#include "torch/storage_writes.h"

namespace castor {

[[nodiscard]] at::ScalarType to_torch(ScalarType type);

/// Returns torch's version counter of a tensor, which counts writes to the tensor and to every
/// alias of it.
[[nodiscard]] std::uint32_t version_of(const at::Tensor& tensor);

/// Sizes and strides, in elements, of a parameter in its place in a chunk. Dense layouts keep their
/// strides.
struct ParamGeometry {
  at::DimVector sizes;
  at::DimVector strides;
};

[[nodiscard]] ParamGeometry geometry_of(const at::Tensor& tensor);

/// Copies on torch's intra-op threads, with the kernel of the CPU. The copy goes below everything
/// that a user may have put between: no autograd graph, dispatch mode or profiler sees it. Source
/// and target have the same size and do not overlap.
void copy_on_cpu(std::span<const std::byte> source, std::byte* target);

/// Returns a tensor over `storage` from element `offset` on, with a version counter of its own.
[[nodiscard]] at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType type,
                                     std::size_t offset, const ParamGeometry& geometry);

/// Returns whether `storage` is the tensor's storage; a tensor may have none.
[[nodiscard]] bool lies_over(const at::Tensor& tensor, const c10::Storage& storage) noexcept;

/// Returns whether the tensor covers all of the storage, with elements of that type and geometry.
[[nodiscard]] bool lies_over(const at::Tensor& tensor, const c10::Storage& storage,
                             at::ScalarType type, const ParamGeometry& geometry) noexcept;

/// Lays the tensor over all of a storage, with elements of the type that the tensor has. The
/// tensor's version counter, and what autograd knows of it, stay.
void lay_over(const at::Tensor& tensor, const c10::Storage& storage, const ParamGeometry& geometry);

/// Returns whether the storage has memory that others than castor have given it (by
/// share_memory_()).
[[nodiscard]] bool has_other_memory(const c10::Storage& storage) noexcept;

/// Returns whether the storage is in memory of torch's that several processes share.
[[nodiscard]] bool is_shared_by_processes(const c10::Storage& storage) noexcept;
/// Returns whether the storage is a mapped file of which the process has its own pages.
[[nodiscard]] bool is_mapped_privately(const c10::Storage& storage) noexcept;

/// Turns a storage that borrowed memory of castor's into an ordinary one of torch's. The storage
/// gets the memory of `tensor`, which holds the same bytes and which nothing else refers to.
void give_memory(const c10::Storage& storage, at::Tensor tensor) noexcept;

/// Returns a storage of `bytes` bytes that points nowhere.
[[nodiscard]] c10::Storage empty_storage(std::size_t bytes, c10::Device device = c10::kCPU);

/// Points `to` where `from` does. Torch throws the same for both when it is asked for the address.
void copy_pointer(const c10::Storage& from, const c10::Storage& to);

/// Points a storage, and so every tensor over it, at memory that others own.
void point(const c10::Storage& storage, std::byte* address) noexcept;

/// Makes torch throw `message` from now on when it is asked for the storage's address while the
/// storage points nowhere.
void forbid_null(const c10::Storage& storage, std::string message);

/// Makes torch throw `message` from now on when it is asked for the storage's address.
void forbid(const c10::Storage& storage, std::string message);

/// Makes torch throw, until allow(), when it is asked for the storage's address: an update of the
/// storage's bytes is under way. No effect where torch throws already.
void forbid_while_updated(const c10::Storage& storage);
void allow(const c10::Storage& storage) noexcept;

/// Returns a storage over `bytes` bytes of a payload, from byte `offset` on. The storage keeps the
/// payload alive and follows it where it moves. `device`: the device on which torch's operators
/// run, wherever the bytes are.
[[nodiscard]] c10::Storage storage_over(std::shared_ptr<Payload> payload, std::size_t offset,
                                        std::size_t bytes, c10::Device device = c10::kCPU);
/// Returns a storage over all of a payload, likewise.
[[nodiscard]] c10::Storage storage_over(std::shared_ptr<Payload> payload,
                                        c10::Device device = c10::kCPU);

/// Torch storages of the parameters. Each lies over the bytes of its parameter in the chunk and no
/// others, so that whoever saves or copies a tensor by its storage takes that parameter. Moving a
/// chunk rebinds the storages of its parameters, and every alias follows: the Parameter, tied
/// weights, a state_dict, views that autograd saved. While the runtime lives, storages borrow the
/// memory they point at. release_to_host() gives each its place in the payload of its chunk for
/// good.
///
/// Owned by the session; guarded by the runtime's mutex once training runs.
class ChunkStorages final : public ParamBinder, public AddressFollower {
 public:
  /// Makes the storages, on `device`; they point nowhere until bind().
  ChunkStorages(const ChunkLayout& layout, c10::Device device);

  /// Starts to see writes, whoever makes them: to the parameters, given in ParamId order, and to
  /// everything else that lies over their storages.
  void watch(std::span<const at::Tensor> params);
  using WriteBack = std::function<void(ChunkId, const std::byte* host, const std::byte* slot)>;
  /// Sets the function that is called before user writes on the device overwrite a chunk's host
  /// storage; see ParamBinder.
  void on_write_back(WriteBack callback) { on_write_back_ = std::move(callback); }
  [[nodiscard]] const c10::Storage& storage(ParamId param) const {
    return storages_.storage(param);
  }
  /// Same as ParamStorages::renew. The old storage is followed no longer.
  c10::Storage renew(ParamId param);
  /// Puts `storage`, an ordinary one of torch's of the parameter's size, in the place of the
  /// parameter's; its own memory is freed. Everything else over `storage` follows the parameter
  /// from now on. The tensors over it are unknown, and so are the version counters that count their
  /// writes: see distrust().
  void adopt(ParamId param, const c10::Storage& storage);
  /// Counts the parameter as written while its storage has more than `uses` references, since
  /// anybody may have written it.
  void distrust(ParamId param, std::size_t uses);
  /// Notes that an operator that counts no writes has written the parameter.
  void note_write(ParamId param) noexcept;
  /// Returns whether somebody has written to the chunk since the previous call for it. Requires
  /// that the chunk is in no slot and not resident: afterwards snapshot() counts from here.
  [[nodiscard]] bool take_written(ChunkId chunk) noexcept;
  /// Same as ParamStorages::for_each.
  void for_each(ChunkId chunk, const std::function<void(const c10::Storage&)>& use) const {
    storages_.for_each(chunk, use);
  }

  void bind(ChunkId chunk, std::byte* address) noexcept override { point_at(chunk, address); }
  /// Does what bind() does.
  void point_at(ChunkId chunk, std::byte* address) const noexcept override {
    storages_.point_at(chunk, address);
  }
  void copy_on_device(std::span<const std::byte> source, std::byte* target) override;
  void snapshot(ChunkId chunk) noexcept override;
  [[nodiscard]] bool written_since_snapshot(ChunkId chunk) const noexcept override;
  void before_write_back(ChunkId chunk, const std::byte* host, const std::byte* slot) override {
    if (on_write_back_) {
      on_write_back_(chunk, host, slot);
    }
  }

  /// Binds each storage to its place in `host_payloads` and lets it own that memory; storages of
  /// payloads on NVMe point nowhere. Called after the chunk manager is gone.
  void release_to_host(const std::vector<std::shared_ptr<Payload>>& host_payloads);

 private:
  c10::Storage replace(ParamId param, const c10::Storage& storage);

  const ChunkLayout& layout_;
  const c10::Device device_;
  ParamStorages storages_;
  std::vector<std::unique_ptr<StorageWrites>> writes_;  // per chunk; empty before watch()
  WriteBack on_write_back_;
};

}  // namespace castor
