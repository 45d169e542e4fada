#include "torch/tensor_gate.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "torch/torch_error.h"

namespace castor {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

/// The key set of a tensor is a protected member without a setter for this key.
struct KeySet : c10::TensorImpl {
  static c10::DispatchKeySet& of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->*(&KeySet::key_set_);
  }
};

void mark(const at::Tensor& tensor) { KeySet::of(tensor) = KeySet::of(tensor).add(kKey); }
void unmark(const at::Tensor& tensor) { KeySet::of(tensor) = KeySet::of(tensor).remove(kKey); }

/// Who watches a storage that is closed. Thread-safe.
class ClosedStorages {
 public:
  struct Watcher {
    std::weak_ptr<TensorGate> gate;
    std::size_t group = 0;
  };

  static ClosedStorages& instance() {
    static ClosedStorages storages;
    return storages;
  }
  void add(const at::Tensor& tensor, Watcher watcher) {
    const std::lock_guard lock(mutex_);
    watchers_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), std::move(watcher));
  }
  void remove(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    watchers_.erase(tensor.storage().unsafeGetStorageImpl());
  }
  [[nodiscard]] Watcher find(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = watchers_.find(tensor.storage().unsafeGetStorageImpl());
    return found == watchers_.end() ? Watcher{} : found->second;
  }

 private:
  std::mutex mutex_;  // guards watchers_
  std::unordered_map<const c10::StorageImpl*, Watcher> watchers_;
};

void pass(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kKey)) {
    return;
  }
  const ClosedStorages::Watcher watcher = ClosedStorages::instance().find(tensor);
  if (const auto gate = watcher.gate.lock()) {
    gate->pass(watcher.group);
  }
  unmark(tensor);  // an alias is watched by nobody
}

void pass_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    ::torch::jit::Stack* stack) {
  for_torch([&] {
    for (const c10::IValue& value : ::torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor()) {
        pass(value.toTensor());
      } else if (value.isList()) {
        for (const c10::IValue& element : value.toListRef()) {
          if (element.isTensor()) {
            pass(element.toTensor());
          }
        }
      }
    }
  });
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(::torch::CppFunction::makeFromBoxedFunction<&pass_arguments>());
}

std::shared_ptr<TensorGate> TensorGate::create(std::size_t num_groups, Settle settle) {
  // Not make_shared: the constructor is private.
  return std::shared_ptr<TensorGate>(new TensorGate(num_groups, std::move(settle)));
}

TensorGate::TensorGate(std::size_t num_groups, Settle settle)
    : groups_(num_groups), settle_(std::move(settle)) {}

TensorGate::~TensorGate() {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    open(group);
  }
}

void TensorGate::watch(std::size_t group, at::Tensor tensor) {
  const std::lock_guard lock(mutex_);
  if (groups_[group].closed) {
    ClosedStorages::instance().add(tensor, {weak_from_this(), group});
    mark(tensor);
  }
  groups_[group].tensors.push_back(std::move(tensor));
}

void TensorGate::close(std::size_t group) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(groups_[group].closed, true)) {
    return;
  }
  ++num_closed_;
  for (const at::Tensor& tensor : groups_[group].tensors) {
    ClosedStorages::instance().add(tensor, {weak_from_this(), group});
    mark(tensor);
  }
}

void TensorGate::open_locked(std::size_t group) {
  if (!std::exchange(groups_[group].closed, false)) {
    return;
  }
  --num_closed_;
  for (const at::Tensor& tensor : groups_[group].tensors) {
    ClosedStorages::instance().remove(tensor);
    unmark(tensor);
  }
}

void TensorGate::open(std::size_t group) {
  const std::lock_guard lock(mutex_);
  open_locked(group);
}

void TensorGate::pass_locked(std::size_t group) {
  if (groups_[group].closed) {
    settle_(group);
    open_locked(group);
  }
}

void TensorGate::pass(std::size_t group) {
  const std::lock_guard lock(mutex_);
  pass_locked(group);
}

void TensorGate::pass_all() {
  const std::lock_guard lock(mutex_);
  for (std::size_t group = 0; group < groups_.size() && num_closed_ > 0; ++group) {
    pass_locked(group);
  }
}

}  // namespace castor
