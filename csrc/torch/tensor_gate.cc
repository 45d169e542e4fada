#include "torch/tensor_gate.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <string>
#include <utility>

#include "store/tensor_errors.h"
#include "torch/chunk_storages.h"
#include "torch/gil.h"
#include "torch/operator_tensors.h"
#include "torch/storage_writes.h"
#include "torch/torch_error.h"

namespace castor {
namespace {

constexpr c10::DispatchKey kGateKey = c10::DispatchKey::DeferredInit;

/// The key set of a tensor is a protected member without a setter for this key. Threads that read
/// the tensor look at it while others change it.
struct KeySet : c10::TensorImpl {
  static std::atomic_ref<c10::DispatchKeySet> of(const at::TensorBase& tensor) {
    return std::atomic_ref(tensor.unsafeGetTensorImpl()->*(&KeySet::key_set_));
  }
};

[[nodiscard]] bool marked(const at::TensorBase& tensor) {
  return KeySet::of(tensor).load().has(kGateKey);
}
void mark(const at::TensorBase& tensor) {
  const auto keys = KeySet::of(tensor);
  for (c10::DispatchKeySet old = keys.load();
       !keys.compare_exchange_weak(old, old.add(kGateKey));) {
  }
}
void unmark(const at::TensorBase& tensor) {
  const auto keys = KeySet::of(tensor);
  for (c10::DispatchKeySet old = keys.load();
       !keys.compare_exchange_weak(old, old.remove(kGateKey));) {
  }
}

/// The watcher of a marked tensor's storage. The mark goes where nobody watches it: an alias has
/// kept it, or the storage was opened just now.
MemoryWatchers::Watcher watcher_of(const at::TensorBase& tensor) {
  return MemoryWatchers::instance().find(tensor.storage().unsafeGetStorageImpl(),
                                         [&] { unmark(tensor); });
}

/// A tensor of a group with its storage. A user may give `tensor` other memory at any time: the
/// gate holds back `storage`.
class WatchedTensor final : public WatchedMemory {
 public:
  WatchedTensor(at::Tensor tensor, MemoryWatchers::Watcher watcher)
      : tensor_(std::move(tensor)), storage_(tensor_.storage()), watcher_(std::move(watcher)) {}

  [[nodiscard]] const void* tensor() const noexcept override {
    return tensor_.unsafeGetTensorImpl();
  }
  [[nodiscard]] const void* memory() const noexcept override {
    return storage_.unsafeGetStorageImpl();
  }
  void hold_back() override {
    MemoryWatchers::instance().add(memory(), watcher_);
    if (lies_over(tensor_, storage_)) {
      mark(tensor_);
    }
  }
  void let_tensor_go() override { unmark(tensor_); }
  void let_memory_go() override { MemoryWatchers::instance().remove(memory()); }
  void forbid() override { forbid_while_updated(storage_); }
  void allow() noexcept override { castor::allow(storage_); }

 private:
  const at::Tensor tensor_;
  const c10::Storage storage_;
  const MemoryWatchers::Watcher watcher_;
};

void pass(const at::Tensor& tensor, bool writes, GuardedUses& uses) {
  if (!tensor.defined() || !marked(tensor)) {
    return;
  }
  const MemoryWatchers::Watcher watcher = watcher_of(tensor);
  auto gate = watcher.gate.lock();
  if (!gate || OperatorVisits::under_way(*gate, watcher.group, writes)) {
    return;
  }
  const auto guard = gate->pass(watcher.group, writes, [&] { unmark(tensor); });
  if (guard != GateGroups::Guard::kNone) {
    uses.add(std::move(gate), {.group = watcher.group, .writes = writes}, guard);
  }
}

// The CPU's kernels of these call an operator for each tensor of their lists, of which each has its
// own visit: all at once need not fit in memory (clip_grad_norm_).
bool goes_one_by_one(const c10::OperatorHandle& op) {
  return op.schema().name().starts_with("aten::_foreach_");
}

// The operators that they call are those of the tensors' device again.
c10::DispatchKeySet with_kernels_of_cpu(c10::DispatchKeySet keys) {
  return keys.remove_backend(c10::BackendComponent::CUDABit) |
         c10::DispatchKeySet(c10::BackendComponent::CPUBit);
}

// A collective goes on when its operator has returned, and the memory may be another chunk's then.
void check_synchronous(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name.starts_with("c10d::") || name.starts_with("_c10d_functional::") ||
      name.starts_with("_c10d_functional_autograd::")) {
    throw tensor_errors::collective_outlives_memory(name);
  }
}

void pass_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    ::torch::jit::Stack* stack) {
  OperatorVisits visits;
  c10::DispatchKeySet rest = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kGateKey);
  for_torch([&] {
    const GilRelease released;  // some of torch's functions keep it
    GuardedUses uses;
    for_each_tensor(op.schema(), *stack,
                    [&](const at::Tensor& tensor, bool writes) { pass(tensor, writes, uses); });
    if (uses.empty()) {
      return;
    }
    if (uses.brought() && goes_one_by_one(op)) {
      rest = with_kernels_of_cpu(rest);
      return;
    }
    if (uses.brought()) {
      check_synchronous(op);
    }
    uses.visit(visits);
  });
  op.redispatchBoxed(rest, stack);
}

/// Waits as an operator on the tensor would, where its group is closed.
void await_closed(const at::TensorBase& tensor) {
  if (!tensor.defined() || !marked(tensor)) {
    return;
  }
  const MemoryWatchers::Watcher watcher = watcher_of(tensor);
  if (const auto gate = watcher.gate.lock()) {
    for_torch([&] {
      const GilRelease released;
      gate->pass(watcher.group);
    });
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(::torch::CppFunction::makeFromBoxedFunction<&pass_arguments>());
}

std::shared_ptr<TensorGate> TensorGate::create(std::size_t num_groups, Settle settle, Reader reader,
                                               Visit visit) {
  set_before_data(await_closed);
  // Not make_shared: the constructor is private.
  return std::shared_ptr<TensorGate>(new TensorGate(std::make_shared<GateGroups>(
      num_groups, std::move(settle), std::move(reader), std::move(visit))));
}

std::size_t TensorGate::watch(std::size_t group, at::Tensor tensor) {
  return groups_->watch(group, std::make_unique<WatchedTensor>(
                                   std::move(tensor), MemoryWatchers::Watcher{groups_, group}));
}

void TensorGate::replace(std::size_t group, std::size_t position, at::Tensor tensor) {
  groups_->replace(
      group, position,
      std::make_unique<WatchedTensor>(std::move(tensor), MemoryWatchers::Watcher{groups_, group}));
}

void TensorGate::follow(std::size_t group, const at::Tensor& tensor) {
  groups_->if_held_back(group, [&] { mark(tensor); });
}

bool is_gated(const at::Tensor& tensor) noexcept { return marked(tensor); }

at::Tensor readable(const at::Tensor& tensor) { return marked(tensor) ? tensor.clone() : tensor; }

}  // namespace castor
