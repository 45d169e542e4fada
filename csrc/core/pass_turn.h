#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "core/mutex.h"

namespace castor {

/// Scheduler of the threads that call one model: the pass of one thread at a time runs, and the
/// others wait for its end. A turn is the union of what its owner has under way:
///   - a forward, from the outermost module's entry to that module's exit;
///   - backward passes, which autograd's threads run on behalf of the thread that called backward;
///   - sections: a step, a save, a load.
/// Whatever the owner begins within its turn belongs to it: a recomputation in backward, a hook
/// that calls the model again, a backward pass within a forward. Waiting threads are served first
/// come, first served.
///
/// A wait ends with a UsageError where it cannot be known to end. That is when the owner has done
/// nothing with the model for patience(), or when the waiting thread is the autograd thread that
/// the owner's backward pass needs. The turn of a thread that has died is over.
///
/// Thread-safe: one mutex, and nothing else is taken while it is held. An event that changes
/// nothing of the turn does not take it: a module within a forward, a gradient within a backward
/// pass. Owned by the session, through Passes.
class PassTurn {
 public:
  using Task = int;
  static constexpr Task kNoTask = -1;
  static constexpr std::chrono::milliseconds kPatience = std::chrono::minutes(5);

  /// Thread with a number that no other thread ever has.
  struct Thread : std::enable_shared_from_this<Thread> {
    std::uint64_t number = 0;
    long native_id = 0;  ///< number from Python's threading.get_native_id()
  };
  /// Returns the number that the operating system has for the calling thread.
  using NativeId = long (*)();
  /// Sets the numbers by which messages name threads that call for the first time from now on.
  static void number_threads_by(NativeId native_id) noexcept;
  /// Function that a waiting thread calls ten times a second, with no mutex held. An exception of
  /// it ends the wait.
  using Look = void (*)();
  /// Sets the Look function of all models of the process.
  static void look_by(Look look) noexcept;
  /// Returns the calling thread's Thread, which lives as long as the thread.
  [[nodiscard]] static const Thread& this_thread();

  /// The thread that an event comes from, and the backward pass that it works for.
  struct Caller {
    const Thread* thread = &this_thread();
    /// Whether the thread is autograd's thread of a device, which runs backward passes of many
    /// threads.
    bool shared = false;
    Task task = kNoTask;  ///< autograd's number of the backward pass
  };

  /// Turn that made a graph. It tells whether a backward pass belongs to the turn under way.
  struct Origin {
    std::uint64_t turn = 0;    ///< its number; 0: not known
    std::uint64_t thread = 0;  ///< the number of the thread that called the model; 0: not known
  };

  struct Joined {
    bool in_task = false;      ///< the caller works for a backward pass
    bool task_is_new = false;  ///< the pass was not known: end_task has to follow
    bool nested = false;       ///< the pass is within another one
    bool left_behind = false;  ///< the last owner has died, and left modules entered
  };

  enum class Mode : std::uint8_t { kTraining, kInference };
  /// Kind of a section; kRunsBackward: its owner waits in it for a backward pass.
  enum class Section : std::uint8_t { kPlain, kRunsBackward };

  PassTurn() = default;
  PassTurn(const PassTurn&) = delete;
  PassTurn& operator=(const PassTurn&) = delete;

  /// Takes the turn before a module's forward. Between a backward that has updated weights and its
  /// step, inference of threads other than the trainer's waits for the step, at most half a minute.
  Joined enter_forward(const Caller& caller, Mode mode);
  /// Ends the forward: no module is under way any more. No effect where no forward is.
  void end_forward();
  /// Joins a backward pass in which something of the model happens, over a graph of that origin.
  Joined join_backward(const Caller& caller, Origin origin);
  /// Ends the backward pass. Returns whether no other is under way.
  bool end_task(Task task);
  /// Enters a section; sections nest like scopes. `what` names the section in the caller's words.
  Joined enter_section(const Caller& caller, Section kind, const std::string& what);
  void end_section(Section kind);

  /// Notes that the weights are between two steps: a backward has updated some of them.
  void step_is_due();
  void step_is_over();

  [[nodiscard]] std::size_t num_waiting() const;
  /// Returns whether the turn is the caller's.
  [[nodiscard]] bool mine(const Caller& caller) const;
  /// Returns whether the caller has a forward or a backward pass under way.
  [[nodiscard]] bool in_pass(const Caller& caller) const;
  /// Returns whether the backward pass is the only one under way.
  [[nodiscard]] bool only_task(Task task) const;
  /// Returns the origin of graphs that are made now. Requires that the turn is the caller's.
  [[nodiscard]] Origin origin() const noexcept CASTOR_NOT_ANALYZED {
    return {.turn = number_, .thread = author_};
  }

  /// Returns how long a thread waits while the owner does nothing with the model; the same for all
  /// models of the process.
  [[nodiscard]] static std::chrono::milliseconds patience() noexcept;
  /// Sets patience() and returns its previous value. For tests.
  static std::chrono::milliseconds set_patience(std::chrono::milliseconds patience) noexcept;

 private:
  [[nodiscard]] bool taken() const noexcept CASTOR_REQUIRES(mutex_) {
    return forward_ || sections_ > 0 || !tasks_.empty();
  }
  [[nodiscard]] bool has(Task task) const noexcept CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool is_owner(const Caller& caller) const noexcept CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool belongs(const Caller& caller, Origin origin) const noexcept
      CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool works_for_owner(const Caller& caller) const noexcept CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool awaits_step(const Caller& caller, Mode mode) const noexcept
      CASTOR_REQUIRES(mutex_);
  /// Caller that waits.
  struct Waiter {
    const Caller& caller;
    Mode mode;
  };
  /// Returns whether nobody stands between the turn and `waiter`; nullptr: a caller that just came.
  [[nodiscard]] bool free_for(const Waiter* waiter) const noexcept CASTOR_REQUIRES(mutex_);
  void forget_the_dead(Joined& joined) CASTOR_REQUIRES(mutex_);
  /// Returns once the turn is the caller's.
  Joined take(MutexLock& lock, const Caller& caller, Origin origin, Mode mode)
      CASTOR_REQUIRES(mutex_);
  void await(MutexLock& lock, const Waiter& waiter, Joined& joined) CASTOR_REQUIRES(mutex_);
  /// Waits for the next end of a turn, at most 100 ms, and calls the Look function if none came.
  void wait_and_look(MutexLock& lock) CASTOR_REQUIRES(mutex_);
  [[noreturn]] void throw_never_over(const Caller& caller) const CASTOR_REQUIRES(mutex_);
  void add_task(const Caller& caller, Joined& joined) CASTOR_REQUIRES(mutex_);
  void release() CASTOR_REQUIRES(mutex_);
  void wake() CASTOR_REQUIRES(mutex_);
  /// Returns whether the caller's forward goes on, outside of backward passes. Needs no mutex: none
  /// but the caller begins its forward, and what another thread ends is not under way.
  [[nodiscard]] bool forward_goes_on(const Caller& caller) const noexcept {
    return !caller.shared && caller.task == kNoTask &&
           forward_thread_.load(std::memory_order_relaxed) == caller.thread->number;
  }
  /// Returns whether the caller works for the only backward pass under way, and is known to.
  [[nodiscard]] bool backward_goes_on(const Caller& caller) const noexcept {
    return caller.task != kNoTask && only_task_.load(std::memory_order_acquire) == caller.task &&
           (!caller.shared || worker_.load(std::memory_order_relaxed) == caller.thread->number);
  }
  void count_event() noexcept { num_events_.fetch_add(1, std::memory_order_relaxed); }
  /// Brings what is read without the mutex up to date.
  void publish() noexcept CASTOR_REQUIRES(mutex_);
  /// Scope of a change to the turn: publishes it at the end.
  class Change;

  mutable Mutex mutex_;
  std::condition_variable over_;
  std::list<const Waiter*> waiting_ CASTOR_GUARDED_BY(mutex_);  // in the order of arrival

  std::uint64_t number_ CASTOR_GUARDED_BY(mutex_) = 0;  // of the turn
  // Number of the thread that called the model; autograd's threads continue its pass.
  std::uint64_t author_ CASTOR_GUARDED_BY(mutex_) = 0;
  // Number of the thread that has the turn; 0 if a backward pass began on a thread of autograd's.
  std::uint64_t thread_ CASTOR_GUARDED_BY(mutex_) = 0;
  long native_id_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::weak_ptr<const Thread> alive_ CASTOR_GUARDED_BY(mutex_);
  std::vector<std::uint64_t> workers_ CASTOR_GUARDED_BY(mutex_);  // autograd's, for this turn
  bool forward_ CASTOR_GUARDED_BY(mutex_) = false;
  std::size_t sections_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t backward_sections_ CASTOR_GUARDED_BY(mutex_) = 0;  // kRunsBackward ones
  std::string section_ CASTOR_GUARDED_BY(mutex_);
  std::vector<Task> tasks_ CASTOR_GUARDED_BY(mutex_);  // nested ones last
  // Of all owners. Relaxed: who waits only asks whether it moves.
  std::atomic<std::uint64_t> num_events_{0};

  // What events read without the mutex, under which it is written (publish()). A thread finds its
  // own number, or the task that it works for, only where it, or who handed it the task, has put
  // that there.
  std::atomic<std::uint64_t> owner_{0};           // thread_
  std::atomic<std::uint64_t> forward_thread_{0};  // thread_ while its forward runs without tasks
  std::atomic<Task> only_task_{kNoTask};          // of tasks_
  std::atomic<std::uint64_t> worker_{0};          // the last of workers_

  bool step_due_ CASTOR_GUARDED_BY(mutex_) = false;
  // Ran the last training forward; written under the mutex.
  std::atomic<std::uint64_t> trainer_{0};
};

}  // namespace castor
