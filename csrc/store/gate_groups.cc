#include "store/gate_groups.h"

#include <algorithm>
#include <iterator>

namespace castor {
namespace {

/// Groups that the operators under way on this thread visit.
thread_local std::vector<std::pair<const GateGroups*, OperatorUse>> visited;

}  // namespace

GateGroups::GateGroups(std::size_t num_groups, Settle settle, Reader reader, Visit visit)
    : groups_(num_groups),
      settle_(std::move(settle)),
      reader_(std::move(reader)),
      visit_(std::move(visit)) {}

GateGroups::~GateGroups() {
  for (const Group& group : groups_) {
    if (group.held_back()) {
      for (const auto& memory : group.watched) {
        memory->allow();
        memory->let_memory_go();
        memory->let_tensor_go();
      }
    }
  }
}

void GateGroups::Group::let_go() const {
  if (held_back()) {
    return;
  }
  for (const auto& memory : watched) {
    memory->let_memory_go();
    memory->let_tensor_go();
  }
}

void GateGroups::Group::begin_watch(WatchedMemory& memory) const {
  if (held_back()) {
    memory.hold_back();
  }
  if (closed) {
    memory.forbid();
  }
}

void GateGroups::guard(std::size_t group, Guard guard) {
  const MutexLock lock(mutex_);
  groups_[group].guard = guard;
}

std::size_t GateGroups::watch(std::size_t group, std::unique_ptr<WatchedMemory> memory) {
  const MutexLock lock(mutex_);
  groups_[group].begin_watch(*memory);
  groups_[group].watched.push_back(std::move(memory));
  return groups_[group].watched.size() - 1;
}

void GateGroups::replace(std::size_t group, std::size_t position,
                         std::unique_ptr<WatchedMemory> memory) {
  const MutexLock lock(mutex_);
  std::unique_ptr<WatchedMemory>& own = groups_[group].watched[position];
  if (groups_[group].held_back()) {
    own->allow();
    own->let_memory_go();
    own->let_tensor_go();
  }
  groups_[group].begin_watch(*memory);
  // What was there goes without the mutex, with the argument: its Python object may go with it.
  std::swap(own, memory);
}

void GateGroups::unwatch(std::size_t group, const void* tensor) {
  std::vector<std::unique_ptr<WatchedMemory>> gone;  // without the mutex, as above
  const MutexLock lock(mutex_);
  pass_locked(group);
  auto& watched = groups_[group].watched;
  const auto last =
      std::stable_partition(watched.begin(), watched.end(),
                            [tensor](const auto& one) { return one->tensor() != tensor; });
  gone.assign(std::make_move_iterator(last), std::make_move_iterator(watched.end()));
  watched.erase(last, watched.end());
  if (gone.empty() || !groups_[group].held_back()) {
    return;
  }
  gone.front()->let_tensor_go();
  const void* const memory = gone.front()->memory();
  if (std::none_of(watched.begin(), watched.end(),
                   [memory](const auto& one) { return one->memory() == memory; })) {
    gone.front()->let_memory_go();
  }
}

void GateGroups::if_held_back(std::size_t group, const std::function<void()>& work) {
  const MutexLock lock(mutex_);
  if (groups_[group].held_back()) {
    work();
  }
}

void GateGroups::close(std::size_t group) {
  const MutexLock lock(mutex_);
  if (std::exchange(groups_[group].closed, true)) {
    return;
  }
  num_closed_.fetch_add(1, std::memory_order_relaxed);
  for (const auto& memory : groups_[group].watched) {
    memory->hold_back();
    memory->forbid();
  }
}

void GateGroups::open_locked(Group& group) {
  if (!std::exchange(group.closed, false)) {
    return;
  }
  for (const auto& memory : group.watched) {
    memory->allow();
  }
  group.let_go();
  num_closed_.fetch_sub(1, std::memory_order_release);
}

void GateGroups::open(std::size_t group) {
  if (num_closed_.load(std::memory_order_acquire) == 0) {
    return;
  }
  const MutexLock lock(mutex_);
  open_locked(groups_[group]);
}

void GateGroups::share(std::size_t group) {
  const MutexLock lock(mutex_);
  groups_[group].shared = true;
  for (const auto& memory : groups_[group].watched) {
    memory->hold_back();
  }
}

void GateGroups::pass_locked(std::size_t group) {
  if (groups_[group].closed) {
    settle_(group);
    open_locked(groups_[group]);
  }
}

void GateGroups::pass(std::size_t group) {
  const MutexLock lock(mutex_);
  pass_locked(group);
}

GateGroups::Guard GateGroups::pass(std::size_t group, bool writes,
                                   const std::function<void()>& let_go) {
  if (writes) {
    reader_.await(group);
  }
  const MutexLock lock(mutex_);
  pass_locked(group);
  Group& own = groups_[group];
  if (own.shared && !reader_.reads(group)) {
    own.shared = false;
    own.let_go();
  }
  if (!own.held_back()) {
    let_go();
  }
  return own.guard;
}

void GateGroups::pass_all() {
  const MutexLock lock(mutex_);
  for (std::size_t group = 0;
       group < groups_.size() && num_closed_.load(std::memory_order_relaxed) > 0; ++group) {
    pass_locked(group);
  }
}

MemoryWatchers& MemoryWatchers::instance() {
  static MemoryWatchers watchers;
  return watchers;
}

void MemoryWatchers::add(const void* memory, Watcher watcher) {
  const MutexLock lock(mutex_);
  watchers_.insert_or_assign(memory, std::move(watcher));
}

void MemoryWatchers::remove(const void* memory) {
  const MutexLock lock(mutex_);
  watchers_.erase(memory);
}

MemoryWatchers::Watcher MemoryWatchers::find(const void* memory,
                                             const std::function<void()>& unwatched) {
  const MutexLock lock(mutex_);
  const auto found = watchers_.find(memory);
  if (found == watchers_.end()) {
    unwatched();
    return {};
  }
  return found->second;
}

bool OperatorVisits::under_way(const GateGroups& gate, std::size_t group, bool writes) {
  return std::any_of(visited.begin(), visited.end(), [&](const auto& visit) {
    const OperatorUse& use = visit.second;
    return visit.first == &gate && use.group == group && (use.writes || !writes);
  });
}

OperatorVisits::~OperatorVisits() { visited.resize(visited.size() - num_groups_); }

void OperatorVisits::begin(GateGroups& gate, std::span<const OperatorUse> uses) {
  visits_.push_back(gate.visit(uses));
  for (const OperatorUse& use : uses) {
    visited.emplace_back(&gate, use);
    ++num_groups_;
  }
}

void GuardedUses::add(std::shared_ptr<GateGroups> gate, OperatorUse use, GateGroups::Guard guard) {
  brought_ = brought_ || guard == GateGroups::Guard::kBrought;
  auto of_gate = std::find_if(uses_.begin(), uses_.end(),
                              [&](const auto& entry) { return entry.first == gate; });
  if (of_gate == uses_.end()) {
    of_gate = uses_.insert(uses_.end(), {std::move(gate), {}});
  }
  auto& uses = of_gate->second;
  const auto same = std::find_if(
      uses.begin(), uses.end(), [&](const OperatorUse& other) { return other.group == use.group; });
  if (same == uses.end()) {
    uses.push_back(use);
  } else {
    same->writes = same->writes || use.writes;
  }
}

void GuardedUses::visit(OperatorVisits& visits) const {
  for (const auto& [gate, uses] : uses_) {
    visits.begin(*gate, uses);
  }
}

}  // namespace castor
