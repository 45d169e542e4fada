#include "torch/storage_writes.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/VariableHooksInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "core/mutex.h"
#include "torch/operator_tensors.h"
#include "torch/torch_versions.h"
#include "torch/uses.h"

namespace castor {

/// Whose writes are asked for, by storage. Thread-safe.
class WatchedWrites {
 public:
  static WatchedWrites& instance() {
    static WatchedWrites& watched = *new WatchedWrites;  // tensors may outlive static objects
    return watched;
  }
  [[nodiscard]] Mutex& mutex() noexcept { return mutex_; }
  void add(StorageWrites& writes) {
    const MutexLock lock(mutex_);
    for (const c10::StorageImpl* const storage : writes.storages_) {
      by_storage_[storage] = &writes;
    }
  }
  void remove(const StorageWrites& writes) {
    const MutexLock lock(mutex_);
    for (const c10::StorageImpl* const storage : writes.storages_) {
      by_storage_.erase(storage);
    }
  }
  /// Chunks' storages are not resizable, nearly all others are.
  [[nodiscard]] static bool may_hold(const at::TensorBase& tensor) {
    return tensor.defined() && tensor.has_storage() && !tensor.storage().resizable();
  }
  void follow(const at::TensorBase& tensor) {
    if (!may_hold(tensor)) {
      return;
    }
    const MutexLock lock(mutex_);
    if (StorageWrites* const writes = find(tensor.storage().unsafeGetStorageImpl())) {
      writes->follow_locked(tensor);
    }
  }
  [[nodiscard]] bool watches(const c10::StorageImpl* storage) noexcept {
    const MutexLock lock(mutex_);
    return find(storage) != nullptr;
  }
  void replace(StorageWrites& writes, const c10::StorageImpl* storage,
               const c10::StorageImpl* other) {
    const MutexLock lock(mutex_);
    by_storage_.erase(storage);
    by_storage_[other] = &writes;
    std::replace(writes.storages_.begin(), writes.storages_.end(), storage, other);
    std::erase_if(writes.distrusted_,
                  [storage](const auto& entry) { return entry.storage == storage; });
  }
  void note(const c10::StorageImpl* storage) noexcept {
    const MutexLock lock(mutex_);
    if (StorageWrites* const writes = find(storage)) {
      writes->written_ = true;
    }
  }

 private:
  [[nodiscard]] StorageWrites* find(const c10::StorageImpl* storage) noexcept
      CASTOR_REQUIRES(mutex_) {
    const auto found = by_storage_.find(storage);
    return found == by_storage_.end() ? nullptr : found->second;
  }

  Mutex mutex_;  // guards what by_storage_ points at, too
  std::unordered_map<const c10::StorageImpl*, StorageWrites*> by_storage_ CASTOR_GUARDED_BY(mutex_);
};

namespace {

std::atomic<BeforeData> before_data = nullptr;
std::atomic<std::uint64_t> given_memory = 0;

void count_given_memory(const at::TensorBase& before) noexcept {
  if (WatchedWrites::may_hold(before)) {
    given_memory.fetch_add(1, std::memory_order_relaxed);  // who looks was told, or is this thread
  }
}

/// torch's hooks, and follows the tensors that they make, or give memory, with a version counter
/// that is not that of the memory's other tensors.
class FollowingHooks : public at::impl::VariableHooksInterface {
 public:
  explicit FollowingHooks(at::impl::VariableHooksInterface& torchs) : torchs_(torchs) {}

  at::TensorBase variable_data(const at::TensorBase& tensor) const override {
    if (const BeforeData call = before_data.load()) {
      call(tensor);
    }
    at::TensorBase made = torchs_.variable_data(tensor);
    WatchedWrites::instance().follow(made);
    return made;
  }
  void set_data(const at::TensorBase& tensor, const at::TensorBase& data) const override {
    count_given_memory(tensor);
    torchs_.set_data(tensor, data);
    WatchedWrites::instance().follow(tensor);
  }

  // As they are.
  at::TensorBase tensor_data(const at::TensorBase& tensor) const override {
    return torchs_.tensor_data(tensor);
  }
  const torch_versions::NodePointer& grad_fn(const at::TensorBase& tensor) const override {
    return torchs_.grad_fn(tensor);
  }
  unsigned _register_hook(
      const at::TensorBase& tensor,
      std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return torchs_._register_hook(tensor, std::move(hook));
  }
  void remove_hook(const at::TensorBase& tensor, unsigned position) const override {
    torchs_.remove_hook(tensor, position);
  }
  bool is_view(const at::TensorBase& tensor) const override { return torchs_.is_view(tensor); }
  const at::TensorBase& base(const at::TensorBase& tensor) const override {
    return torchs_.base(tensor);
  }
  const std::string& name(const at::TensorBase& tensor) const override {
    return torchs_.name(tensor);
  }
  bool is_leaf(const at::TensorBase& tensor) const override { return torchs_.is_leaf(tensor); }
  std::int64_t output_nr(const at::TensorBase& tensor) const override {
    return torchs_.output_nr(tensor);
  }
  at::TensorBase data(const at::TensorBase& tensor) const override { return torchs_.data(tensor); }
  std::int64_t _version(const at::TensorBase& tensor) const override {
    return torchs_._version(tensor);
  }
  void retain_grad(const at::TensorBase& tensor) const override { torchs_.retain_grad(tensor); }
  bool retains_grad(const at::TensorBase& tensor) const override {
    return torchs_.retains_grad(tensor);
  }
  void _backward(const at::Tensor& tensor, at::TensorList inputs,
                 const std::optional<at::Tensor>& gradient, std::optional<bool> keep_graph,
                 bool create_graph) const override {
    torchs_._backward(tensor, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& tensor, bool required) const override {
    torchs_.requires_grad_(tensor, required);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op,
                                               c10::DispatchKeySet keys,
                                               ::torch::jit::Stack* stack) const override {
    torchs_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  // Of newer releases of torch: overrides where the interface has them.
  virtual std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& tensor) const {
    return grad_dtype_of(torchs_, tensor);
  }
  virtual void set_grad_dtype(const at::TensorBase& tensor,
                              const std::optional<c10::ScalarType>& type) const {
    set_grad_dtype_of(torchs_, tensor, type);
  }

 private:
  template <typename Hooks>
  static std::optional<c10::ScalarType> grad_dtype_of(Hooks& hooks, const at::TensorBase& tensor) {
    if constexpr (requires { hooks.grad_dtype(tensor); }) {
      return hooks.grad_dtype(tensor);
    }
    return std::nullopt;
  }
  template <typename Hooks>
  static void set_grad_dtype_of(Hooks& hooks, const at::TensorBase& tensor,
                                const std::optional<c10::ScalarType>& type) {
    if constexpr (requires { hooks.set_grad_dtype(tensor, type); }) {
      hooks.set_grad_dtype(tensor, type);
    }
  }

  at::impl::VariableHooksInterface& torchs_;
};

// Every thread has it in its key set, so that kernels for it need no mark on tensors; torch itself
// has some for operators that make tensors.
constexpr c10::DispatchKey kResultKey = c10::DispatchKey::BackendSelect;

void call_next(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
               ::torch::jit::Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kResultKey),
                     stack);
}

/// The storages that an operator writes, by its schema; noted when the operator is over, or failed.
class Written {
 public:
  Written(const c10::FunctionSchema& schema, const ::torch::jit::Stack& stack) {
    for_each_tensor(schema, stack, [this](const at::Tensor& tensor, bool writes) {
      if (writes) {
        add(tensor);
      }
    });
  }
  ~Written() {
    for (const c10::Storage& storage : storages_) {
      WatchedWrites::instance().note(storage.unsafeGetStorageImpl());
    }
  }
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;

 private:
  void add(const at::Tensor& tensor) {
    if (WatchedWrites::may_hold(tensor)) {
      storages_.push_back(tensor.storage());
    }
  }

  std::vector<c10::Storage> storages_;
};

void note_writes(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 ::torch::jit::Stack* stack) {
  const Written written(op.schema(), *stack);
  call_next(op, keys, stack);
}

void follow_result(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   ::torch::jit::Stack* stack) {
  count_given_memory(::torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor());
  call_next(op, keys, stack);
  WatchedWrites::instance().follow(::torch::jit::peek(*stack, 0, 1).toTensor());
}

/// Gives operators the kernels above: those that torch knows, and those that it gets to know.
class Operators final : public c10::OpRegistrationListener {
 public:
  static Operators& instance() {
    static Operators& operators = []() -> Operators& {
      auto listener = std::make_unique<Operators>();
      Operators& own = *listener;
      // Never removed: extensions may be loaded, and run, at any time.
      static auto& handle = *new c10::RegistrationHandleRAII(
          c10::Dispatcher::singleton().addRegistrationListener(std::move(listener)));
      static_cast<void>(handle);
      return own;
    }();
    return operators;
  }
  void notice_new() {
    if (!any_new_.load(std::memory_order_acquire)) {
      return;
    }
    std::vector<c10::OperatorName> names;
    {
      const MutexLock lock(mutex_);
      names.swap(new_);
      any_new_.store(false, std::memory_order_relaxed);
    }
    for (const c10::OperatorName& name : names) {
      follow(name);
    }
  }

  // The dispatcher is locked meanwhile: kernels cannot be given yet.
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    const MutexLock lock(mutex_);
    new_.push_back(op.operator_name());
    any_new_.store(true, std::memory_order_release);
  }
  void onOperatorDeregistered(const c10::OperatorHandle& /*op*/) override {}

 private:
  static bool writes(const c10::FunctionSchema& schema) {
    const auto& arguments = schema.arguments();
    return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
      return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    });
  }
  static void follow(const c10::OperatorName& name) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !writes(op->schema()) || op->hasKernelForDispatchKey(kResultKey)) {
      return;
    }
    if (name.name == "aten::set_") {
      give(name, kResultKey, c10::KernelFunction::makeFromBoxedFunction<&follow_result>());
      return;
    }
    const bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    const bool torchs = name.name.starts_with("aten::") || name.name.starts_with("prims::");
    if (op->hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView) || (composite && torchs)) {
      return;  // it counts, or calls what counts
    }
    if (composite) {
      // Autograd's keys come first and would run the kernel. It is reached behind kResultKey all
      // the same, and what it calls starts anew with all keys.
      for (const c10::DispatchKey key :
           {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
            c10::DispatchKey::AutogradPrivateUse1}) {
        if (!op->hasKernelForDispatchKey(key)) {
          give(name, key, c10::KernelFunction::makeFallthrough());
        }
      }
    }
    give(name, kResultKey, c10::KernelFunction::makeFromBoxedFunction<&note_writes>());
  }
  static void give(const c10::OperatorName& name, c10::DispatchKey key,
                   c10::KernelFunction kernel) {
    static auto& handles = *new std::vector<c10::RegistrationHandleRAII>;
    handles.push_back(c10::Dispatcher::singleton().registerImpl(
        name, key, std::move(kernel), std::nullopt, nullptr, "castor: writes to chunks"));
  }

  Mutex mutex_;
  std::vector<c10::OperatorName> new_ CASTOR_GUARDED_BY(mutex_);  // since notice_new()
  std::atomic<bool> any_new_ = false;
};

void install_hooks() {
  static const bool installed = [] {
    static auto& hooks = *new FollowingHooks(*at::impl::GetVariableHooks());
    at::impl::SetVariableHooks(&hooks);
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace

void notice_new_operators() { Operators::instance().notice_new(); }

void set_before_data(BeforeData call) {
  before_data = call;
  install_hooks();
}

StorageWrites::StorageWrites(std::span<const c10::Storage> storages) {
  for (const c10::Storage& storage : storages) {
    if (storage.resizable()) {
      throw InvalidArgument("a storage whose writes are watched may not be resizable");
    }
    storages_.push_back(storage.unsafeGetStorageImpl());
  }
  install_hooks();
  notice_new_operators();
  WatchedWrites::instance().add(*this);
}

StorageWrites::~StorageWrites() { WatchedWrites::instance().remove(*this); }

void StorageWrites::follow(const at::TensorBase& tensor) {
  const MutexLock lock(WatchedWrites::instance().mutex());
  follow_locked(tensor);
}

void StorageWrites::follow_locked(const at::TensorBase& tensor) {
  if (counters_.size() + uncounted_.size() >= prune_at_) {
    prune();
    prune_at_ = 2 * (counters_.size() + uncounted_.size()) + 16;
  }
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (counter.enabled()) {
    counters_.push_back({counter, counter.current_version()});
  } else {
    uncounted_.emplace_back(tensor.getIntrusivePtr());
  }
}

void StorageWrites::prune() noexcept {
  std::erase_if(counters_, [this](const Counter& counter) {
    const bool gone = counter.version.unique();
    written_ = written_ || (gone && counter.changed());
    return gone;
  });
  written_ = std::erase_if(uncounted_, [](const auto& tensor) { return tensor.expired(); }) > 0 ||
             written_;
}

bool is_watched(const c10::Storage& storage) {
  return WatchedWrites::instance().watches(storage.unsafeGetStorageImpl());
}

std::uint64_t num_given_memory() noexcept { return given_memory.load(std::memory_order_relaxed); }

void StorageWrites::replace(const c10::Storage& storage, const c10::Storage& other) {
  WatchedWrites::instance().replace(*this, storage.unsafeGetStorageImpl(),
                                    other.unsafeGetStorageImpl());
}

void StorageWrites::distrust(const c10::Storage& storage, std::size_t uses) {
  const MutexLock lock(WatchedWrites::instance().mutex());
  distrusted_.push_back({storage.unsafeGetStorageImpl(), uses});
}

void StorageWrites::note() noexcept {
  const MutexLock lock(WatchedWrites::instance().mutex());
  written_ = true;
}

void StorageWrites::snapshot() noexcept {
  const MutexLock lock(WatchedWrites::instance().mutex());
  prune();
  // Others that are gone by now can write no more; until now they may have written.
  std::erase_if(distrusted_,
                [](const Distrusted& entry) { return uses_of(*entry.storage) <= entry.uses; });
  for (Counter& counter : counters_) {
    counter.at_snapshot = counter.version.current_version();
  }
  written_ = false;
}

bool StorageWrites::since_snapshot() const noexcept {
  const MutexLock lock(WatchedWrites::instance().mutex());
  return written_ || !uncounted_.empty() || !distrusted_.empty() ||
         std::any_of(counters_.begin(), counters_.end(),
                     [](const Counter& counter) { return counter.changed(); });
}

}  // namespace castor
