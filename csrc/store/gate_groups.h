#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/mutex.h"
#include "store/operator_gate.h"

namespace castor {

/// Memory that a gate watches, with the tensor over it by which operators come to it. Called with
/// the gate's mutex held.
class WatchedMemory {
 public:
  virtual ~WatchedMemory() = default;
  /// Return what tells the tensor, and its memory, from others.
  [[nodiscard]] virtual const void* tensor() const noexcept = 0;
  [[nodiscard]] virtual const void* memory() const noexcept = 0;
  /// Makes operators on the tensor, or on an alias made from now on, pass the gate.
  virtual void hold_back() = 0;
  /// Lets operators on the tensor go past the gate, or those on any other tensor over the memory.
  virtual void let_tensor_go() = 0;
  virtual void let_memory_go() = 0;
  /// Makes torch throw where it is asked for the memory's address, until allow().
  virtual void forbid() = 0;
  virtual void allow() noexcept = 0;
};

/// Groups of memory behind a gate, each of which opens and closes as one (TensorGate). While a
/// group is closed, the first operator on its memory calls `settle` for the group. `settle` returns
/// when the memory may be used; the group is open from then on.
///
/// While a save still reads a group's memory, on a thread of its own, only the operators that write
/// it are held back. Reader::await returns when the memory has been read.
///
/// Guarded groups are those whose memory is not there all the time, or may become another's while
/// an operator runs. Every operator on one runs within a visit, which has the memory there and
/// keeps it (OperatorVisits).
///
/// Thread-safe. `settle` and `visit` must not come back to the gate, and a reader never does.
class GateGroups {
 public:
  enum class Guard : std::uint8_t {
    kNone,
    kHeld,     ///< a visit costs no memory
    kBrought,  ///< a visit may have to bring it in; nothing may use it after that visit
  };
  using Settle = std::function<void(std::size_t group)>;
  /// Reader of groups beside the operators.
  struct Reader {
    std::function<bool(std::size_t group)> reads;  ///< whether it still reads it; never waits
    Settle await;                                  ///< waits until it does not any more
  };
  /// Begins the visit of different groups, which ends with the returned object.
  using Visit = std::function<std::shared_ptr<void>(std::span<const OperatorUse> uses)>;

  /// Makes open groups. `visit` may be empty where no group is guarded.
  GateGroups(std::size_t num_groups, Settle settle, Reader reader, Visit visit);
  /// Lets all memory go.
  ~GateGroups();
  GateGroups(const GateGroups&) = delete;
  GateGroups& operator=(const GateGroups&) = delete;

  /// Guards the group so from now on and for good. To be called before memory is watched.
  void guard(std::size_t group, Guard guard);
  /// Adds memory to the group, which belongs to no other group. Returns its position there.
  std::size_t watch(std::size_t group, std::unique_ptr<WatchedMemory> memory);
  /// Puts `memory` in place of what is at that position.
  void replace(std::size_t group, std::size_t position, std::unique_ptr<WatchedMemory> memory);
  /// Ends what watch() began for a tensor. Opens the group as pass() does. Positions of what was
  /// watched later shift.
  void unwatch(std::size_t group, const void* tensor);
  /// Calls `work` if operators on the group's memory pass the gate; meanwhile that stays so.
  void if_held_back(std::size_t group, const std::function<void()>& work);

  void close(std::size_t group);
  void open(std::size_t group);
  /// Notes that a reader has begun with the group. No call notes its end, since the reader waits
  /// for nobody.
  void share(std::size_t group);
  void pass(std::size_t group);
  /// Same as pass(group), for an operator. Waits for the reader too if the operator `writes`. Calls
  /// `let_go` if nothing holds the group back any more: who holds it back again does so after.
  /// Returns how the group is guarded.
  Guard pass(std::size_t group, bool writes, const std::function<void()>& let_go);
  void pass_all();
  [[nodiscard]] std::shared_ptr<void> visit(std::span<const OperatorUse> uses) {
    return visit_(uses);
  }

 private:
  struct Group {
    std::vector<std::unique_ptr<WatchedMemory>> watched;
    bool closed = false;
    bool shared = false;  // a reader has begun; it may have ended
    Guard guard = Guard::kNone;

    [[nodiscard]] bool held_back() const noexcept {
      return closed || shared || guard != Guard::kNone;
    }
    /// Lets go what nothing holds back any more.
    void let_go() const;
    void begin_watch(WatchedMemory& memory) const;
  };
  void open_locked(Group& group) CASTOR_REQUIRES(mutex_);
  void pass_locked(std::size_t group) CASTOR_REQUIRES(mutex_);

  Mutex mutex_;  // held while settle runs, so that nobody closes meanwhile
  std::vector<Group> groups_ CASTOR_GUARDED_BY(mutex_);
  // Groups that are closed, or being opened; written under the mutex. Release and acquire: who sees
  // none sees all of them open.
  std::atomic<std::size_t> num_closed_{0};
  const Settle settle_;
  const Reader reader_;
  const Visit visit_;
};

/// Register of the memory that a gate holds back, and of the group that watches it, for the
/// process: an operator that finds a tensor marked asks here. Thread-safe.
class MemoryWatchers {
 public:
  struct Watcher {
    std::weak_ptr<GateGroups> gate;
    std::size_t group = 0;
  };

  [[nodiscard]] static MemoryWatchers& instance();
  void add(const void* memory, Watcher watcher);
  void remove(const void* memory);
  /// Returns the watcher of the memory. Where there is none, calls `unwatched` before anybody can
  /// watch it again, and returns a watcher without a gate.
  [[nodiscard]] Watcher find(const void* memory, const std::function<void()>& unwatched);

 private:
  Mutex mutex_;
  std::unordered_map<const void*, Watcher> watchers_ CASTOR_GUARDED_BY(mutex_);
};

/// Visits of the guarded groups that one operator uses. They end with the object. Used by the
/// thread that runs the operator. The operators which that one calls use the groups without asking:
/// what holds a group back by now may be waiting for that visit to end.
class OperatorVisits {
 public:
  OperatorVisits() = default;
  ~OperatorVisits();
  OperatorVisits(const OperatorVisits&) = delete;
  OperatorVisits& operator=(const OperatorVisits&) = delete;

  /// Returns whether an operator under way on this thread visits the group, to write it if
  /// `writes`.
  [[nodiscard]] static bool under_way(const GateGroups& gate, std::size_t group, bool writes);
  /// Begins a visit.
  void begin(GateGroups& gate, std::span<const OperatorUse> uses);

 private:
  std::vector<std::shared_ptr<void>> visits_;
  std::size_t num_groups_ = 0;
};

/// The guarded groups that an operator uses, by gate.
class GuardedUses {
 public:
  void add(std::shared_ptr<GateGroups> gate, OperatorUse use, GateGroups::Guard guard);
  [[nodiscard]] bool empty() const noexcept { return uses_.empty(); }
  /// Returns whether one of the groups is brought into memory.
  [[nodiscard]] bool brought() const noexcept { return brought_; }
  void visit(OperatorVisits& visits) const;

 private:
  std::vector<std::pair<std::shared_ptr<GateGroups>, std::vector<OperatorUse>>> uses_;
  bool brought_ = false;
};

}  // namespace castor
