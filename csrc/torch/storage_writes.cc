#include "torch/storage_writes.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/VariableHooksInterface.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/mutex.h"
#include "torch/operator_tensors.h"
#include "torch/torch_versions.h"
#include "torch/uses.h"

namespace castor {
namespace {

/// Writes by one tensor and all that share its version counter.
class CountedWrites final : public WriteSign {
 public:
  explicit CountedWrites(const c10::VariableVersion& version)
      : version_(version), at_mark_(version.current_version()) {}

  [[nodiscard]] bool changed() const noexcept override {
    return version_.current_version() != at_mark_;
  }
  [[nodiscard]] bool gone() const noexcept override { return version_.unique(); }
  void mark() noexcept override { at_mark_ = version_.current_version(); }

 private:
  const c10::VariableVersion version_;
  std::uint32_t at_mark_;
};

/// Writes that nothing counts: there may be some as long as somebody is there who could write.
class UncountedWrites final : public WriteSign {
 public:
  explicit UncountedWrites(std::function<bool()> gone) : gone_(std::move(gone)) {}

  [[nodiscard]] bool changed() const noexcept override { return true; }
  [[nodiscard]] bool gone() const noexcept override { return gone_(); }
  void mark() noexcept override {}

 private:
  const std::function<bool()> gone_;
};

std::unique_ptr<WriteSign> writes_of(const at::TensorBase& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (counter.enabled()) {
    return std::make_unique<CountedWrites>(counter);
  }
  return std::make_unique<UncountedWrites>(  // made in inference mode
      [made = c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr())] {
        return made.expired();
      });
}

const void* address_of(const c10::Storage& storage) { return storage.unsafeGetStorageImpl(); }

/// Chunks' storages are not resizable, nearly all others are.
bool may_be_watched(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.has_storage() && !tensor.storage().resizable();
}

void follow_new(const at::TensorBase& tensor) {
  if (may_be_watched(tensor)) {
    MemoryWrites::follow_at(address_of(tensor.storage()), [&] { return writes_of(tensor); });
  }
}

std::atomic<BeforeData> before_data = nullptr;
std::atomic<std::uint64_t> given_memory = 0;

void count_given_memory(const at::TensorBase& before) noexcept {
  if (may_be_watched(before)) {
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
    follow_new(made);
    return made;
  }
  void set_data(const at::TensorBase& tensor, const at::TensorBase& data) const override {
    count_given_memory(tensor);
    torchs_.set_data(tensor, data);
    follow_new(tensor);
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
      MemoryWrites::note_at(address_of(storage));
    }
  }
  Written(const Written&) = delete;
  Written& operator=(const Written&) = delete;

 private:
  void add(const at::Tensor& tensor) {
    if (may_be_watched(tensor)) {
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
  follow_new(::torch::jit::peek(*stack, 0, 1).toTensor());
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

std::vector<const void*> addresses_of(std::span<const c10::Storage> storages) {
  std::vector<const void*> addresses;
  for (const c10::Storage& storage : storages) {
    if (storage.resizable()) {
      throw InvalidArgument("a storage whose writes are watched may not be resizable");
    }
    addresses.push_back(address_of(storage));
  }
  return addresses;
}

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

StorageWrites::StorageWrites(std::span<const c10::Storage> storages)
    : MemoryWrites(addresses_of(storages)) {
  install_hooks();
  notice_new_operators();
}

void StorageWrites::follow(const at::TensorBase& tensor) {
  MemoryWrites::follow(writes_of(tensor));
}

void StorageWrites::replace(const c10::Storage& storage, const c10::Storage& other) {
  MemoryWrites::replace(address_of(storage), address_of(other));
}

void StorageWrites::distrust(const c10::Storage& storage, std::size_t uses) {
  MemoryWrites::follow(std::make_unique<UncountedWrites>([impl = storage.unsafeGetStorageImpl(),
                                                          uses] { return uses_of(*impl) <= uses; }),
                       address_of(storage));
}

bool is_watched(const c10::Storage& storage) { return MemoryWrites::watched(address_of(storage)); }

std::uint64_t num_given_memory() noexcept { return given_memory.load(std::memory_order_relaxed); }

}  // namespace castor
