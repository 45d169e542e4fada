#include "core/pass_turn.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {
namespace {

using Clock = std::chrono::steady_clock;

/// Between backward and step nothing but the trainer's own code runs.
constexpr std::chrono::milliseconds kStepPatience{30'000};
/// How often a waiting thread looks whether the owner is alive and moves on.
constexpr std::chrono::milliseconds kLook{100};

// Relaxed: a number of its own, which orders nothing.
std::atomic<std::chrono::milliseconds::rep> patience_ms{PassTurn::kPatience.count()};

// Relaxed: a function, and nothing that it depends on.
std::atomic<PassTurn::NativeId> native_id_of_caller{[] { return 0L; }};

// Relaxed: as above.
std::atomic<PassTurn::Look> look_of_waiter{[] {}};

}  // namespace

class PassTurn::Change {
 public:
  explicit Change(PassTurn& turn) : turn_(turn) {}
  ~Change() CASTOR_NOT_ANALYZED { turn_.publish(); }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

 private:
  PassTurn& turn_;
};

// The worker before the task: who finds the task sees no worker of an earlier turn.
void PassTurn::publish() noexcept {
  owner_.store(thread_, std::memory_order_relaxed);
  forward_thread_.store(forward_ && tasks_.empty() ? thread_ : 0, std::memory_order_relaxed);
  worker_.store(workers_.empty() ? 0 : workers_.back(), std::memory_order_relaxed);
  only_task_.store(tasks_.size() == 1 ? tasks_.front() : kNoTask, std::memory_order_release);
}

const PassTurn::Thread& PassTurn::this_thread() {
  thread_local const std::shared_ptr<const Thread> thread = [] {
    // Relaxed: only that no two are equal matters.
    static std::atomic<std::uint64_t> last_number = 0;
    auto made = std::make_shared<Thread>();
    made->number = last_number.fetch_add(1, std::memory_order_relaxed) + 1;
    made->native_id = native_id_of_caller.load(std::memory_order_relaxed)();
    return made;
  }();
  return *thread;
}

void PassTurn::number_threads_by(NativeId native_id) noexcept {
  native_id_of_caller.store(native_id, std::memory_order_relaxed);
}

void PassTurn::look_by(Look look) noexcept {
  look_of_waiter.store(look, std::memory_order_relaxed);
}

std::chrono::milliseconds PassTurn::patience() noexcept {
  return std::chrono::milliseconds(patience_ms.load(std::memory_order_relaxed));
}

std::chrono::milliseconds PassTurn::set_patience(std::chrono::milliseconds patience) noexcept {
  return std::chrono::milliseconds(
      patience_ms.exchange(patience.count(), std::memory_order_relaxed));
}

bool PassTurn::has(Task task) const noexcept {
  return std::find(tasks_.begin(), tasks_.end(), task) != tasks_.end();
}

bool PassTurn::is_owner(const Caller& caller) const noexcept {
  return taken() && ((caller.task != kNoTask && has(caller.task)) ||
                     (!caller.shared && caller.thread->number == thread_));
}

bool PassTurn::works_for_owner(const Caller& caller) const noexcept {
  return std::find(workers_.begin(), workers_.end(), caller.thread->number) != workers_.end();
}

// A device's thread of autograd's comes with a backward pass that is not known. It is within the
// turn where it goes over a graph that the turn has made (a recomputation's), or one of the same
// thread's while that thread's backward pass, or section, is under way (a hook that
// differentiates). What begins with something else than the gradient of a graph is taken for
// nested, too.
bool PassTurn::belongs(const Caller& caller, Origin origin) const noexcept {
  if (!taken() || !caller.shared || caller.task == kNoTask) {
    return false;
  }
  if (origin.turn != 0 && origin.turn == number_) {
    return true;
  }
  if (tasks_.empty() && backward_sections_ > 0) {
    return true;
  }
  return (!tasks_.empty() || sections_ > 0) &&
         (origin.thread == 0 || author_ == 0 ? works_for_owner(caller) : origin.thread == author_);
}

bool PassTurn::awaits_step(const Caller& caller, Mode mode) const noexcept {
  return step_due_ && mode == Mode::kInference && caller.task == kNoTask &&
         caller.thread->number != trainer_.load(std::memory_order_relaxed);
}

bool PassTurn::free_for(const Waiter* waiter) const noexcept {
  if (taken()) {
    return false;
  }
  const auto first = std::find_if(waiting_.begin(), waiting_.end(),
                                  [this](const Waiter* other) CASTOR_NOT_ANALYZED {
                                    return !awaits_step(other->caller, other->mode);
                                  });
  return (first == waiting_.end() ? nullptr : *first) == waiter;
}

void PassTurn::wake() {
  if (!waiting_.empty()) {
    over_.notify_all();
  }
}

void PassTurn::release() {
  thread_ = 0;
  alive_.reset();
  workers_.clear();
  publish();
  wake();
}

void PassTurn::forget_the_dead(Joined& joined) {
  if (taken() && thread_ != 0 && alive_.expired()) {
    forward_ = false;
    sections_ = 0;
    backward_sections_ = 0;
    tasks_.clear();
    joined.left_behind = true;
    release();
  }
}

void PassTurn::throw_never_over(const Caller& caller) const {
  std::string what = sections_ > 0 ? section_ : tasks_.empty() ? "a forward" : "a backward";
  if (thread_ != 0) {
    what += " of thread " + std::to_string(native_id_);
  }
  throw UsageError(
      "thread " + std::to_string(caller.thread->native_id) + " has waited " +
      std::to_string(std::chrono::duration_cast<std::chrono::seconds>(patience()).count()) +
      " s for its turn with the model, and " + what +
      ", which is under way, has neither ended nor come to another module meanwhile "
      "(threading.get_native_id() names threads). One pass at a time runs on a model. Where the "
      "other thread waits for this one (a hook, or a forward, that joins threads which call the "
      "model or parts of it), make these calls in that thread itself; where its pass was "
      "interrupted, call the model there again");
}

// The look may take Python's global lock, whose holder may ask for this mutex.
void PassTurn::wait_and_look(MutexLock& lock) CASTOR_NOT_ANALYZED {
  if (over_.wait_for(lock.native(), kLook) == std::cv_status::no_timeout) {
    return;
  }
  lock.unlock();
  try {
    look_of_waiter.load(std::memory_order_relaxed)();
  } catch (...) {
    lock.lock();
    throw;
  }
  lock.lock();
}

void PassTurn::await(MutexLock& lock, const Waiter& waiter, Joined& joined) {
  const Caller& caller = waiter.caller;
  auto seen = num_events_.load(std::memory_order_relaxed);
  auto last_event = Clock::now();
  while (!free_for(&waiter)) {
    if (caller.shared && taken() && works_for_owner(caller)) {
      throw UsageError(
          "two threads run backward passes of one model at the same time, and autograd's thread "
          "of the device, which runs both, cannot do one after the other: call "
          "booster.backward(loss, optimizer), which waits for its turn, or let one thread at a "
          "time call backward");
    }
    wait_and_look(lock);
    forget_the_dead(joined);
    if (const auto now = num_events_.load(std::memory_order_relaxed); seen != now) {
      seen = now;
      last_event = Clock::now();
      continue;
    }
    const auto quiet = Clock::now() - last_event;
    if (!taken() && awaits_step(caller, waiter.mode) &&
        quiet >= std::min(kStepPatience, patience())) {
      return;  // the weights' state says more than a wait can
    }
    if (quiet >= patience()) {
      throw_never_over(caller);
    }
  }
}

PassTurn::Joined PassTurn::take(MutexLock& lock, const Caller& caller, Origin origin, Mode mode) {
  if (is_owner(caller)) {
    if (caller.task == kNoTask) {
      tasks_.clear();  // those whose end is late
    }
    count_event();
    return {};
  }
  if (belongs(caller, origin)) {
    count_event();
    return {};
  }
  Joined joined;
  if (awaits_step(caller, mode) || !free_for(nullptr)) {
    const Waiter waiter{.caller = caller, .mode = mode};
    const auto place = waiting_.insert(waiting_.end(), &waiter);
    try {
      await(lock, waiter, joined);
    } catch (...) {
      waiting_.erase(place);
      wake();  // it may have stood before others
      throw;
    }
    waiting_.erase(place);
  }
  count_event();
  ++number_;
  author_ = caller.shared ? origin.thread : caller.thread->number;
  if (!caller.shared) {
    thread_ = caller.thread->number;
    native_id_ = caller.thread->native_id;
    alive_ = caller.thread->weak_from_this();
  }
  return joined;
}

void PassTurn::add_task(const Caller& caller, Joined& joined) {
  if (caller.task == kNoTask) {
    return;
  }
  joined.in_task = true;
  if (!has(caller.task)) {
    tasks_.push_back(caller.task);
    joined.task_is_new = true;
  }
  joined.nested = tasks_.size() > 1;
  if (caller.shared && !works_for_owner(caller)) {
    workers_.push_back(caller.thread->number);
  }
}

PassTurn::Joined PassTurn::enter_forward(const Caller& caller, Mode mode) {
  if (forward_goes_on(caller) &&
      (mode == Mode::kInference ||
       trainer_.load(std::memory_order_relaxed) == caller.thread->number)) {
    count_event();
    return {};
  }
  MutexLock lock(mutex_);
  const Change change(*this);
  Joined joined = take(lock, caller, {}, mode);
  forward_ = true;
  add_task(caller, joined);
  if (mode == Mode::kTraining && !joined.in_task) {
    trainer_.store(caller.thread->number, std::memory_order_relaxed);
  }
  return joined;
}

void PassTurn::end_forward() {
  const MutexLock lock(mutex_);
  const Change change(*this);
  count_event();
  forward_ = false;
  if (!taken()) {
    release();
  }
}

PassTurn::Joined PassTurn::join_backward(const Caller& caller, Origin origin) {
  if (backward_goes_on(caller)) {
    count_event();
    return {.in_task = true};
  }
  MutexLock lock(mutex_);
  const Change change(*this);
  Joined joined = take(lock, caller, origin, Mode::kTraining);
  add_task(caller, joined);
  if (!taken()) {
    release();  // outside of any pass: nothing will tell when it is over
  }
  return joined;
}

bool PassTurn::end_task(Task task) {
  const MutexLock lock(mutex_);
  const Change change(*this);
  count_event();
  if (std::erase(tasks_, task) > 0 && !taken()) {
    release();
  }
  return tasks_.empty();
}

PassTurn::Joined PassTurn::enter_section(const Caller& caller, Section kind,
                                         const std::string& what) {
  MutexLock lock(mutex_);
  const Change change(*this);
  Joined joined = take(lock, caller, {}, Mode::kTraining);
  if (sections_++ == 0) {
    section_ = what;
  }
  backward_sections_ += kind == Section::kRunsBackward ? 1 : 0;
  add_task(caller, joined);
  return joined;
}

void PassTurn::end_section(Section kind) {
  const MutexLock lock(mutex_);
  const Change change(*this);
  count_event();
  if (sections_ == 0) {
    return;  // its thread was taken for dead
  }
  --sections_;
  backward_sections_ -= kind == Section::kRunsBackward ? 1 : 0;
  if (!taken()) {
    release();
  }
}

void PassTurn::step_is_due() {
  const MutexLock lock(mutex_);
  step_due_ = true;
}

void PassTurn::step_is_over() {
  const MutexLock lock(mutex_);
  step_due_ = false;
  wake();
}

std::size_t PassTurn::num_waiting() const {
  const MutexLock lock(mutex_);
  return waiting_.size();
}

bool PassTurn::mine(const Caller& caller) const {
  if (!caller.shared && owner_.load(std::memory_order_relaxed) == caller.thread->number) {
    return true;
  }
  const MutexLock lock(mutex_);
  return is_owner(caller);
}

bool PassTurn::in_pass(const Caller& caller) const {
  const MutexLock lock(mutex_);
  return is_owner(caller) && (forward_ || !tasks_.empty());
}

bool PassTurn::only_task(Task task) const {
  const MutexLock lock(mutex_);
  return tasks_.size() == 1 && tasks_.front() == task;
}

}  // namespace castor
