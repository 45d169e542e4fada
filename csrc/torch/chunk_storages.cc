#include "torch/chunk_storages.h"

#include <ATen/ATen.h>
#include <ATen/MapAllocator.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "torch/device_bytes.h"

namespace castor {
namespace {

/// torch's own setter of this flag is only for turning it on. Naming a private member in an
/// explicit instantiation is allowed.
bool& throws_when_read(c10::StorageImpl& storage);
template <bool c10::StorageImpl::*kFlag>
struct PrivateFlag {
  friend bool& throws_when_read(c10::StorageImpl& storage) { return storage.*kFlag; }
};
template struct PrivateFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

const std::string kUpdating =
    "the optimizer is still updating this tensor (overlap=\"forward\" or \"backward\"), and its "
    "memory was asked for without an operator of torch, which would have waited: read "
    "model.state_dict() or a .clone() instead";

/// A weight that is still being updated may be opened by a thread that reads it, while another one
/// enters its module and binds it. Held for a few assignments; never in a forked child.
std::mutex pointing;

using Message = std::optional<std::string>;

/// Returns what torch throws for the storage. Torch reads it without a lock, on the thread that
/// asked for the address: once torch may throw it, it stays, and the flag alone says whether torch
/// does.
Message& message_of(c10::StorageImpl& storage) {
  return storage.get_extra_meta().custom_data_ptr_error_msg_;
}

bool tells_of_update(const Message& message) { return message && *message == kUpdating; }

/// Sets the flag that tells torch to throw the storage's message, and has torch look at it.
void set_throws(c10::StorageImpl& storage, c10::DataPtr data, bool throws) noexcept {
  throws_when_read(storage) = throws;
  storage.set_data_ptr_noswap(std::move(data));
}

void drop_payload(void* context) { delete static_cast<std::shared_ptr<Payload>*>(context); }

/// A pointer that owns a share of `payload`.
c10::DataPtr owning_pointer(std::shared_ptr<Payload> payload, c10::Device device,
                            std::size_t offset = 0) {
  void* data = payload->data() + offset;
  auto owner = std::make_unique<std::shared_ptr<Payload>>(std::move(payload));
  return {data, owner.release(), &drop_payload, device};
}

/// A storage that goes where its payload goes, with every tensor over it, until it gets memory of
/// its own.
class StorageFollower final : public PayloadFollower {
 public:
  StorageFollower(const c10::Storage& storage, std::size_t offset)
      : storage_(storage.getWeakStorageImpl()), offset_(offset) {}

  [[nodiscard]] bool alive() const noexcept override {
    const auto storage = storage_.lock();
    return storage && follows(*storage);
  }
  void moved(std::byte* address) noexcept override {
    const auto storage = storage_.lock();
    if (storage && follows(*storage)) {
      const std::lock_guard lock(pointing);
      // The owner of the old pointer is the payload itself: it owns the new one as well.
      c10::DataPtr& old = storage->_mutable_data_ptr_no_checks();
      const c10::Device device = old.device();
      const c10::DeleterFnPtr deleter = old.get_deleter();
      void* context = old.move_context().release();
      storage->set_data_ptr_noswap(c10::DataPtr(address + offset_, context, deleter, device));
    }
  }

 private:
  [[nodiscard]] static bool follows(c10::StorageImpl& storage) noexcept {
    return storage._mutable_data_ptr_no_checks().get_deleter() == &drop_payload;
  }

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const std::size_t offset_;
};

}  // namespace

c10::Storage empty_storage(std::size_t bytes, c10::Device device) {
  return {c10::Storage::use_byte_size_t{}, bytes, c10::DataPtr(nullptr, device), nullptr,
          /*resizable=*/false};
}

void point(const c10::Storage& storage, std::byte* address) noexcept {
  const std::lock_guard lock(pointing);
  c10::StorageImpl& own = *storage.unsafeGetStorageImpl();
  const Message& message = message_of(own);
  const bool throws =
      tells_of_update(message) ? throws_when_read(own) : message && address == nullptr;
  set_throws(own, c10::DataPtr(address, own.device()), throws);
}

void copy_pointer(const c10::Storage& from, const c10::Storage& to) {
  const std::lock_guard lock(pointing);
  c10::StorageImpl& source = *from.unsafeGetStorageImpl();
  c10::StorageImpl& own = *to.unsafeGetStorageImpl();
  message_of(own) = message_of(source);
  set_throws(own, c10::DataPtr(source._mutable_data_ptr_no_checks().get(), own.device()),
             throws_when_read(source));
}

void forbid_null(const c10::Storage& storage, std::string message) {
  message_of(*storage.unsafeGetStorageImpl()) = std::move(message);
}

void forbid(const c10::Storage& storage, std::string message) {
  forbid_null(storage, std::move(message));
  throws_when_read(*storage.unsafeGetStorageImpl()) = true;
  storage.unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();  // has both flags looked at
}

void forbid_while_updated(const c10::Storage& storage) {
  const std::lock_guard lock(pointing);
  c10::StorageImpl& own = *storage.unsafeGetStorageImpl();
  Message& message = message_of(own);
  if (!message) {
    message = kUpdating;
  }
  if (tells_of_update(message)) {
    set_throws(own, std::move(own._mutable_data_ptr_no_checks()), true);
  }
}

void allow(const c10::Storage& storage) noexcept {
  const std::lock_guard lock(pointing);
  c10::StorageImpl& own = *storage.unsafeGetStorageImpl();
  if (tells_of_update(message_of(own))) {
    set_throws(own, std::move(own._mutable_data_ptr_no_checks()), false);
  }
}

at::ScalarType to_torch(ScalarType type) {
  switch (type) {
    case ScalarType::kFloat32: return at::kFloat;
    case ScalarType::kBFloat16: return at::kBFloat16;
    case ScalarType::kFloat16: return at::kHalf;
    case ScalarType::kUInt8: return at::kByte;
  }
  return at::kFloat;
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

ParamGeometry geometry_of(const at::Tensor& tensor) {
  ParamGeometry geometry{at::DimVector(tensor.sizes()), at::DimVector(tensor.strides())};
  if (!tensor.is_non_overlapping_and_dense()) {
    std::int64_t stride = 1;
    for (std::size_t i = geometry.sizes.size(); i-- > 0;) {
      geometry.strides[i] = stride;
      stride *= std::max<std::int64_t>(geometry.sizes[i], 1);
    }
  }
  return geometry;
}

void copy_on_cpu(std::span<const std::byte> source, std::byte* target) {
  if (source.empty()) {
    return;
  }
  at::Tensor bytes = bytes_at(target, source.size(), c10::kCPU);
  at::_ops::copy_::redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), bytes,
                              bytes_at(source.data(), source.size(), c10::kCPU),
                              /*non_blocking=*/false);
}

at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType type, std::size_t offset,
                       const ParamGeometry& geometry) {
  // Not by Tensor.set_: that reads the storage's address, which a storage on NVMe refuses to give.
  at::Tensor made = at::empty({0}, at::TensorOptions().dtype(type).device(storage.device()));
  c10::TensorImpl& impl = *made.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(storage);
  impl.set_sizes_and_strides(geometry.sizes, geometry.strides, static_cast<std::int64_t>(offset));
  return made;
}

bool lies_over(const at::Tensor& tensor, const c10::Storage& storage) noexcept {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() ==
         storage.unsafeGetStorageImpl();
}

bool lies_over(const at::Tensor& tensor, const c10::Storage& storage, at::ScalarType type,
               const ParamGeometry& geometry) noexcept {
  return lies_over(tensor, storage) && tensor.scalar_type() == type &&
         tensor.storage_offset() == 0 && tensor.sizes() == geometry.sizes &&
         tensor.strides() == geometry.strides;
}

void lay_over(const at::Tensor& tensor, const c10::Storage& storage,
              const ParamGeometry& geometry) {
  c10::TensorImpl& own = *tensor.unsafeGetTensorImpl();
  own.set_storage_keep_dtype(storage);
  own.set_sizes_and_strides(geometry.sizes, geometry.strides, 0);
}

bool has_other_memory(const c10::Storage& storage) noexcept {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context() != nullptr;
}

bool is_shared_by_processes(const c10::Storage& storage) noexcept {
  constexpr int kShared = at::ALLOCATOR_MAPPED_SHARED | at::ALLOCATOR_MAPPED_SHAREDMEM;
  const c10::DataPtr& pointer = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  const auto* const mapped = at::MapAllocator::fromDataPtr(pointer);
  return mapped != nullptr && (mapped->flags() & kShared) != 0;
}

bool is_mapped_privately(const c10::Storage& storage) noexcept {
  const c10::DataPtr& pointer = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return at::MapAllocator::fromDataPtr(pointer) != nullptr && !is_shared_by_processes(storage);
}

void give_memory(const c10::Storage& storage, at::Tensor tensor) noexcept {
  const std::lock_guard lock(pointing);
  c10::StorageImpl& own = *storage.unsafeGetStorageImpl();
  c10::StorageImpl& other = *tensor.storage().unsafeGetStorageImpl();
  own.set_allocator(other.allocator());
  own.set_resizable(other.resizable());
  const c10::Device device = own.device();
  set_throws(own, std::exchange(other._mutable_data_ptr_no_checks(), c10::DataPtr(nullptr, device)),
             false);
}

c10::Storage storage_over(std::shared_ptr<Payload> payload, std::size_t offset, std::size_t bytes,
                          c10::Device device) {
  Payload& followed = *payload;
  c10::Storage storage(c10::Storage::use_byte_size_t{}, bytes,
                       owning_pointer(std::move(payload), device, offset), nullptr,
                       /*resizable=*/false);
  followed.add_follower(std::make_unique<StorageFollower>(storage, offset));
  return storage;
}

c10::Storage storage_over(std::shared_ptr<Payload> payload, c10::Device device) {
  const std::size_t bytes = payload->bytes();
  return storage_over(std::move(payload), 0, bytes, device);
}

ChunkStorages::ChunkStorages(const ChunkLayout& layout, c10::Device device)
    : layout_(layout),
      device_(device),
      storages_(layout, std::vector<bool>(layout.chunks().size(), true), device) {}

void ChunkStorages::watch(std::span<const at::Tensor> params) {
  for (std::size_t i = 0; i < layout_.chunks().size(); ++i) {
    std::vector<c10::Storage> of_chunk;
    for_each(ChunkId{static_cast<std::uint32_t>(i)},
             [&](const c10::Storage& storage) { of_chunk.push_back(storage); });
    writes_.push_back(std::make_unique<StorageWrites>(of_chunk));
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    const ChunkId chunk = layout_.place(ParamId{static_cast<std::uint32_t>(i)}).chunk;
    writes_[index(chunk)]->follow(params[i]);
  }
}

c10::Storage ChunkStorages::renew(ParamId param) {
  return replace(param, empty_storage(storage(param).nbytes(), device_));
}

void ChunkStorages::adopt(ParamId param, const c10::Storage& storage) {
  storage.unsafeGetStorageImpl()->set_resizable(false);
  replace(param, storage);
}

c10::Storage ChunkStorages::replace(ParamId param, const c10::Storage& storage) {
  c10::Storage old = storages_.replace(param, storage);
  if (!writes_.empty()) {
    writes_[index(layout_.place(param).chunk)]->replace(old, storage);
  }
  return old;
}

void ChunkStorages::distrust(ParamId param, std::size_t uses) {
  writes_[index(layout_.place(param).chunk)]->distrust(storage(param), uses);
}

void ChunkStorages::note_write(ParamId param) noexcept {
  writes_[index(layout_.place(param).chunk)]->note();
}

void ChunkStorages::copy_on_device(std::span<const std::byte> source, std::byte* target) {
  if (device_.is_cpu()) {
    copy_on_cpu(source, target);
    return;
  }
  const at::NoGradGuard no_grad;
  bytes_at(target, source.size(), device_).copy_(bytes_at(source.data(), source.size(), device_));
}

void ChunkStorages::snapshot(ChunkId chunk) noexcept { writes_[index(chunk)]->snapshot(); }

bool ChunkStorages::take_written(ChunkId chunk) noexcept {
  return writes_[index(chunk)]->take_written();
}

bool ChunkStorages::written_since_snapshot(ChunkId chunk) const noexcept {
  return writes_[index(chunk)]->since_snapshot();
}

void ChunkStorages::release_to_host(const std::vector<std::shared_ptr<Payload>>& host_payloads) {
  for (std::size_t i = 0; i < layout_.params().size(); ++i) {
    const ParamId param{static_cast<std::uint32_t>(i)};
    const std::shared_ptr<Payload>& host = host_payloads[index(layout_.place(param).chunk)];
    if (host->tier() == TierKind::kNvme) {
      point(storage(param), nullptr);
      continue;
    }
    storage(param).unsafeGetStorageImpl()->set_data_ptr_noswap(
        owning_pointer(host, device_, storages_.byte_offset(param)));
  }
}

}  // namespace castor
