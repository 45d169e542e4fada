#include "store/passes.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "store/charged_account.h"

namespace castor {

/// Lives as long as one backward pass. Of a device with a thread of autograd's own, that thread may
/// be the last to drop it: after backward() has returned, and after the session has gone.
class Passes::End {
 public:
  End(std::weak_ptr<Passes> passes, int pass) : passes_(std::move(passes)), pass_(pass) {}
  ~End() {
    if (const auto passes = passes_.lock()) {
      passes->backward_ended(pass_);
    }
  }
  /// The pass did not fail.
  void reached() const {
    if (const auto passes = passes_.lock()) {
      passes->backward_done(pass_);
    }
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

 private:
  std::weak_ptr<Passes> passes_;
  int pass_;
};

Passes::Passes(const Runtime& runtime, std::shared_ptr<NonModelMemory> charged,
               std::unique_ptr<Autograd> autograd)
    : runtime_(runtime), charged_(std::move(charged)), autograd_(std::move(autograd)) {
  PassTurn::number_threads_by([] { return static_cast<long>(::syscall(SYS_gettid)); });
}

// Memory that the thread allocates after backward (the next micro-batch's data, a user's clipping
// on the host) is not the model's. Autograd drops the callback with the pass, also when the pass
// failed.
void Passes::follow(const Joined& joined) {
  if (joined.task_is_new) {
    auto end = std::make_shared<End>(weak_from_this(), autograd_->caller().task);
    autograd_->at_end([end = std::move(end)] { end->reached(); });
  }
}

Passes::Joined Passes::begin_forward() {
  const bool trains = autograd_->records();
  const Joined joined = turn_.enter_forward(
      autograd_->caller(), trains ? PassTurn::Mode::kTraining : PassTurn::Mode::kInference);
  follow(joined);
  if (!runtime_.idle() && !joined.left_behind) {
    return joined;
  }
  forward_trains_ = trains;
  if (charged_account() != charged_) {
    account_before_ = charged_account();
    charge_allocations_to(charged_);
  }
  return joined;
}

void Passes::end_forward(bool outermost) {
  if (!outermost) {
    return;
  }
  if (!autograd_->records()) {
    charge_allocations_to(std::exchange(account_before_, nullptr));
  }
  turn_.end_forward();
}

bool Passes::in_segment() const { return forward_trains_ && !autograd_->records(); }

bool Passes::mine() const { return turn_.mine(autograd_->caller()); }

// A second forward that stopped early is within a pass: backward goes on behind it.
void Passes::stop_charging() {
  if (!abandoned_ && charged_ && charged_account() == charged_ &&
      !turn_.in_pass(autograd_->caller())) {
    charge_allocations_to(nullptr);
  }
}

Passes::Joined Passes::begin_backward(PassTurn::Origin origin) {
  const Joined joined = follow_backward(origin);
  charge_allocations_to(charged_);
  return joined;
}

Passes::Joined Passes::follow_backward(PassTurn::Origin origin) {
  const Joined joined = turn_.join_backward(autograd_->caller(), origin);
  follow(joined);
  return joined;
}

Passes::Joined Passes::begin_section(PassTurn::Section kind, const std::string& what) {
  const Joined joined = turn_.enter_section(autograd_->caller(), kind, what);
  follow(joined);
  return joined;
}

void Passes::backward_done(int pass) {
  if (!abandoned_ && at_backward_end_ && turn_.only_task(pass)) {
    at_backward_end_();
  }
}

void Passes::backward_ended(int pass) {
  if (!abandoned_ && turn_.end_task(pass)) {
    stop_charging();
  }
}

void Passes::end_step() {
  account_before_.reset();
  if (charged_account() == charged_) {
    charge_allocations_to(nullptr);
  }
}

}  // namespace castor
