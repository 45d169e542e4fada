#include "torch/activation_offload.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "store/tensor_errors.h"
#include "torch/torch_memory.h"

namespace castor {
namespace {

/// A smaller storage stays: a copy would cost more than its bytes are worth.
constexpr std::size_t kSmallest = std::size_t{4} << 10;

/// Whether the tensor is plain memory of `device` that its storage owns. A parameter's storage
/// borrows its bytes from a chunk.
bool can_leave(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.device() != device ||
      !tensor.has_storage() || tensor.is_nested() || tensor.is_conj() || tensor.is_neg() ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
      (tensor.is_leaf() && tensor.requires_grad())) {
    return false;
  }
  const c10::Storage& storage = tensor.storage();
  return storage.nbytes() >= kSmallest && storage.data_ptr().get_context() != nullptr;
}

class OriginalStorage final : public ActivationStore::Original {
 public:
  explicit OriginalStorage(const c10::Storage& storage) : storage_(storage.getWeakStorageImpl()) {}

  [[nodiscard]] std::shared_ptr<DeviceMemory> lock() const override {
    auto alive = storage_.lock();
    return alive ? std::make_shared<TorchMemory>(c10::Storage(std::move(alive))) : nullptr;
  }
  [[nodiscard]] bool expired() const noexcept override { return storage_.expired(); }

 private:
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

}  // namespace

ActivationOffload::ActivationOffload(const std::shared_ptr<Session>& session)
    : device_(session->torch_device()),
      store_(std::make_shared<ActivationStore>(
          ActivationStore::Parts{.owner = session,
                                 .memory = session->memory(),
                                 .copies = session->chunks().copies(),
                                 .take = take_from(device_)})) {}

std::shared_ptr<ActivationOffload::Saved> ActivationOffload::save(const std::shared_ptr<Pass>& pass,
                                                                  const at::Tensor& tensor) {
  auto saved = std::make_shared<Saved>();
  saved->pass_ = pass;
  saved->counter_ = tensor.unsafeGetTensorImpl()->version_counter();
  saved->version_ = saved->counter_.enabled() ? saved->counter_.current_version() : 0;
  if (!can_leave(tensor, device_)) {
    // What a node has computed comes with the node as its origin, which would keep itself alive
    // where backward never runs.
    saved->kept_ = tensor.detach();
    return saved;
  }
  saved->type_ = tensor.scalar_type();
  saved->offset_ = static_cast<std::size_t>(tensor.storage_offset());
  saved->geometry_ = {at::DimVector(tensor.sizes()), at::DimVector(tensor.strides())};
  const c10::Storage& storage = tensor.storage();
  saved->memory_ = store_->keep(*pass, storage.unsafeGetStorageImpl(),
                                [&] { return std::make_unique<OriginalStorage>(storage); });
  return saved;
}

at::Tensor ActivationOffload::restore(const Saved& saved) {
  if (saved.counter_.enabled() && saved.counter_.current_version() != saved.version_) {
    throw tensor_errors::activation_written(saved.counter_.current_version(), saved.version_);
  }
  if (!saved.memory_) {
    return saved.kept_;
  }
  const at::NoGradGuard no_graph;
  return tensor_over(storage_of(*store_->restore(saved.pass_, *saved.memory_)), saved.type_,
                     saved.offset_, saved.geometry_);
}

}  // namespace castor
