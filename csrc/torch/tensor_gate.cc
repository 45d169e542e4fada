#include "torch/tensor_gate.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/error.h"
#include "torch/chunk_storages.h"
#include "torch/gil.h"
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

/// Who watches a storage that is closed or guarded. Thread-safe.
class WatchedStorages {
 public:
  struct Watcher {
    std::weak_ptr<TensorGate> gate;
    std::size_t group = 0;
  };

  static WatchedStorages& instance() {
    static WatchedStorages storages;
    return storages;
  }
  void add(const c10::Storage& storage, Watcher watcher) {
    const MutexLock lock(mutex_);
    watchers_.insert_or_assign(storage.unsafeGetStorageImpl(), std::move(watcher));
  }
  void remove(const c10::Storage& storage) {
    const MutexLock lock(mutex_);
    watchers_.erase(storage.unsafeGetStorageImpl());
  }
  /// Of a marked tensor's storage. The mark goes where nobody watches it: an alias has kept it, or
  /// the storage was opened just now. Under the mutex, so that whoever watches it next marks it
  /// after.
  [[nodiscard]] Watcher find(const at::TensorBase& tensor) {
    const MutexLock lock(mutex_);
    const auto found = watchers_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == watchers_.end()) {
      unmark(tensor);
      return {};
    }
    return found->second;
  }

 private:
  Mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Watcher> watchers_ CASTOR_GUARDED_BY(mutex_);
};

/// Groups that the operators under way on this thread visit. The operators which those call use
/// them without asking: what holds a group back by now may be waiting for that visit to end.
thread_local std::vector<std::pair<const TensorGate*, TensorGate::Use>> visited;

[[nodiscard]] bool is_visited(const TensorGate& gate, std::size_t group, bool writes) {
  return std::any_of(visited.begin(), visited.end(), [&](const auto& visit) {
    const TensorGate::Use& use = visit.second;
    return visit.first == &gate && use.group == group && (use.writes || !writes);
  });
}

/// Visits of one operator.
class Visits {
 public:
  Visits() = default;
  ~Visits() { visited.resize(visited.size() - num_groups_); }
  Visits(const Visits&) = delete;
  Visits& operator=(const Visits&) = delete;

  void begin(TensorGate& gate, std::span<const TensorGate::Use> uses) {
    visits_.push_back(gate.visit(uses));
    for (const TensorGate::Use& use : uses) {
      visited.emplace_back(&gate, use);
      ++num_groups_;
    }
  }

 private:
  std::vector<std::shared_ptr<void>> visits_;
  std::size_t num_groups_ = 0;
};

/// The guarded groups that an operator uses, by gate.
class Uses {
 public:
  void add(std::shared_ptr<TensorGate> gate, std::size_t group, TensorGate::Guard guard,
           bool writes) {
    brought_ = brought_ || guard == TensorGate::Guard::kBrought;
    auto of_gate = std::find_if(uses_.begin(), uses_.end(),
                                [&](const auto& entry) { return entry.first == gate; });
    if (of_gate == uses_.end()) {
      of_gate = uses_.insert(uses_.end(), {std::move(gate), {}});
    }
    auto& uses = of_gate->second;
    const auto same = std::find_if(uses.begin(), uses.end(), [group](const TensorGate::Use& use) {
      return use.group == group;
    });
    if (same == uses.end()) {
      uses.push_back({group, writes});
    } else {
      same->writes = same->writes || writes;
    }
  }
  [[nodiscard]] bool empty() const noexcept { return uses_.empty(); }
  /// Whether one of them is brought into memory.
  [[nodiscard]] bool brought() const noexcept { return brought_; }
  void visit(Visits& visits) const {
    for (const auto& [gate, uses] : uses_) {
      visits.begin(*gate, uses);
    }
  }

 private:
  std::vector<std::pair<std::shared_ptr<TensorGate>, std::vector<TensorGate::Use>>> uses_;
  bool brought_ = false;
};

void pass(const at::Tensor& tensor, bool writes, Uses& uses) {
  if (!tensor.defined() || !marked(tensor)) {
    return;
  }
  const WatchedStorages::Watcher watcher = WatchedStorages::instance().find(tensor);
  if (auto gate = watcher.gate.lock(); gate && !is_visited(*gate, watcher.group, writes)) {
    if (const auto guard = gate->pass(watcher.group, tensor, writes);
        guard != TensorGate::Guard::kNone) {
      uses.add(std::move(gate), watcher.group, guard, writes);
    }
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
    throw UsageError(
        name +
        " was given a parameter or gradient that is on NVMe, or sharded "
        "over ranks, whose memory it would use after the call: give it a .clone() and copy "
        "the result back");
  }
}

void pass_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    ::torch::jit::Stack* stack) {
  Visits visits;
  c10::DispatchKeySet rest = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kGateKey);
  for_torch([&] {
    const GilRelease released;  // some of torch's functions keep it
    Uses uses;
    const auto& arguments = op.schema().arguments();
    const auto values = ::torch::jit::last(*stack, arguments.size());
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = arguments[i].alias_info();
      const bool writes = alias != nullptr && alias->isWrite();
      if (values[i].isTensor()) {
        pass(values[i].toTensor(), writes, uses);
      } else if (values[i].isList()) {
        for (const c10::IValue& element : values[i].toListRef()) {
          if (element.isTensor()) {
            pass(element.toTensor(), writes, uses);
          }
        }
      }
    }
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
  const WatchedStorages::Watcher watcher = WatchedStorages::instance().find(tensor);
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
  return std::shared_ptr<TensorGate>(
      new TensorGate(num_groups, std::move(settle), std::move(reader), std::move(visit)));
}

TensorGate::TensorGate(std::size_t num_groups, Settle settle, Reader reader, Visit visit)
    : groups_(num_groups),
      settle_(std::move(settle)),
      reader_(std::move(reader)),
      visit_(std::move(visit)) {}

TensorGate::~TensorGate() {
  for (Group& group : groups_) {
    if (group.closed || group.shared || group.guard != Guard::kNone) {
      for (const Watched& watched : group.watched) {
        allow(watched.storage);
        WatchedStorages::instance().remove(watched.storage);
        unmark(watched.tensor);
      }
    }
  }
}

void TensorGate::hold_back(std::size_t group, const Watched& watched) {
  WatchedStorages::instance().add(watched.storage, {weak_from_this(), group});
  if (lies_over(watched.tensor, watched.storage)) {
    mark(watched.tensor);
  }
}

bool TensorGate::held_back(std::size_t group) const {
  return groups_[group].closed || groups_[group].shared || groups_[group].guard != Guard::kNone;
}

// Of a group that nothing holds back any more.
void TensorGate::let_go(std::size_t group) {
  if (held_back(group)) {
    return;
  }
  for (const Watched& watched : groups_[group].watched) {
    WatchedStorages::instance().remove(watched.storage);
    unmark(watched.tensor);
  }
}

void TensorGate::guard(std::size_t group, Guard guard) {
  const MutexLock lock(mutex_);
  groups_[group].guard = guard;
}

std::size_t TensorGate::watch(std::size_t group, at::Tensor tensor) {
  const MutexLock lock(mutex_);
  Watched watched{.tensor = std::move(tensor), .storage = {}};
  watched.storage = watched.tensor.storage();
  begin_watch(group, watched);
  groups_[group].watched.push_back(std::move(watched));
  return groups_[group].watched.size() - 1;
}

void TensorGate::begin_watch(std::size_t group, const Watched& watched) {
  if (held_back(group)) {
    hold_back(group, watched);
  }
  if (groups_[group].closed) {
    forbid_while_updated(watched.storage);
  }
}

void TensorGate::replace(std::size_t group, std::size_t position, at::Tensor tensor) {
  Watched other{.tensor = std::move(tensor), .storage = {}};
  other.storage = other.tensor.storage();
  const MutexLock lock(mutex_);
  Watched& own = groups_[group].watched[position];
  if (held_back(group)) {
    allow(own.storage);
    WatchedStorages::instance().remove(own.storage);
    unmark(own.tensor);
  }
  begin_watch(group, other);
  std::swap(own, other);  // what was there goes without the mutex: its Python object may go with it
}

void TensorGate::follow(std::size_t group, const at::Tensor& tensor) {
  const MutexLock lock(mutex_);
  if (held_back(group)) {
    mark(tensor);
  }
}

void TensorGate::unwatch(std::size_t group, const at::Tensor& tensor) {
  std::vector<Watched> gone;  // without the mutex: their Python objects may go with them
  const MutexLock lock(mutex_);
  pass_locked(group);
  std::vector<Watched>& watched = groups_[group].watched;
  const auto last =
      std::stable_partition(watched.begin(), watched.end(),
                            [&tensor](const Watched& one) { return !one.tensor.is_same(tensor); });
  gone.assign(std::make_move_iterator(last), std::make_move_iterator(watched.end()));
  watched.erase(last, watched.end());
  if (gone.empty() || !held_back(group)) {
    return;
  }
  unmark(tensor);
  const c10::StorageImpl* storage = gone.front().storage.unsafeGetStorageImpl();
  if (std::none_of(watched.begin(), watched.end(), [storage](const Watched& one) {
        return one.storage.unsafeGetStorageImpl() == storage;
      })) {
    WatchedStorages::instance().remove(gone.front().storage);
  }
}

void TensorGate::close(std::size_t group) {
  const MutexLock lock(mutex_);
  if (std::exchange(groups_[group].closed, true)) {
    return;
  }
  num_closed_.fetch_add(1, std::memory_order_relaxed);
  for (const Watched& watched : groups_[group].watched) {
    hold_back(group, watched);
    forbid_while_updated(watched.storage);
  }
}

void TensorGate::open_locked(std::size_t group) {
  if (!std::exchange(groups_[group].closed, false)) {
    return;
  }
  for (const Watched& watched : groups_[group].watched) {
    allow(watched.storage);
  }
  let_go(group);
  num_closed_.fetch_sub(1, std::memory_order_release);
}

void TensorGate::open(std::size_t group) {
  if (num_closed_.load(std::memory_order_acquire) == 0) {
    return;
  }
  const MutexLock lock(mutex_);
  open_locked(group);
}

void TensorGate::share(std::size_t group) {
  const MutexLock lock(mutex_);
  groups_[group].shared = true;
  for (const Watched& watched : groups_[group].watched) {
    hold_back(group, watched);
  }
}

void TensorGate::pass_locked(std::size_t group) {
  if (groups_[group].closed) {
    settle_(group);
    open_locked(group);
  }
}

void TensorGate::pass(std::size_t group) {
  const MutexLock lock(mutex_);
  pass_locked(group);
}

TensorGate::Guard TensorGate::pass(std::size_t group, const at::Tensor& tensor, bool writes) {
  if (writes) {
    reader_.await(group);
  }
  const MutexLock lock(mutex_);
  pass_locked(group);
  if (groups_[group].shared && !reader_.reads(group)) {
    groups_[group].shared = false;
    let_go(group);
  }
  if (!held_back(group)) {
    unmark(tensor);  // under the mutex: who holds the group back again marks it after
  }
  return groups_[group].guard;
}

void TensorGate::pass_all() {
  const MutexLock lock(mutex_);
  for (std::size_t group = 0;
       group < groups_.size() && num_closed_.load(std::memory_order_relaxed) > 0; ++group) {
    pass_locked(group);
  }
}

bool is_gated(const at::Tensor& tensor) noexcept { return marked(tensor); }

at::Tensor readable(const at::Tensor& tensor) { return marked(tensor) ? tensor.clone() : tensor; }

}  // namespace castor
