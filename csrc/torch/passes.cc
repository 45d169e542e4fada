#include "torch/passes.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "torch/counting_allocator.h"
#include "torch/torch_error.h"

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

void Passes::begin_forward() {
  if (!runtime_.idle()) {
    return;
  }
  forward_trains_ = at::GradMode::is_enabled();
  if (charged_account() != charged_) {
    account_before_ = charged_account();
    charge_allocations_to(charged_);
  }
}

void Passes::end_forward() {
  if (!at::GradMode::is_enabled() && runtime_.idle()) {
    charge_allocations_to(std::exchange(account_before_, nullptr));
  }
}

bool Passes::in_segment() const { return forward_trains_ && !at::GradMode::is_enabled(); }

void Passes::stop_charging() {
  {
    const MutexLock lock(mutex_);
    if (!backward_.empty()) {  // a second forward that stopped early: backward goes on behind it
      return;
    }
  }
  if (charged_ && charged_account() == charged_ && runtime_.idle()) {
    charge_allocations_to(nullptr);
  }
}

void Passes::begin_backward() {
  charge_allocations_to(charged_);
  follow_backward();
}

// What the thread allocates after backward (the next micro-batch's data, a user's clipping on the
// host) is not the model's. Autograd drops the callback with the pass, also when the pass failed.
bool Passes::follow_backward() {
  const int pass = ::torch::autograd::get_current_graph_task_id();
  bool known = false;
  {
    const MutexLock lock(mutex_);
    if (pass == -1) {
      backward_.clear();  // those whose end is late
      return false;
    }
    known = std::find(backward_.begin(), backward_.end(), pass) != backward_.end();
    if (!known) {
      backward_.push_back(pass);
    }
  }
  if (!known) {
    auto end = std::make_shared<End>(weak_from_this(), pass);
    ::torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::move(end)] { end->reached(); });
  }
  return true;
}

void Passes::backward_done(int pass) {
  if (!at_backward_end_) {
    return;
  }
  const bool outermost = [&] {
    const MutexLock lock(mutex_);
    return backward_.size() == 1 && backward_.front() == pass;
  }();
  if (outermost) {
    for_torch(at_backward_end_);
  }
}

void Passes::backward_ended(int pass) {
  {
    const MutexLock lock(mutex_);
    std::erase(backward_, pass);
    if (!backward_.empty()) {
      return;
    }
  }
  stop_charging();
}

bool Passes::nested() const {
  const MutexLock lock(mutex_);
  return backward_.size() > 1;
}

void Passes::end_step() {
  account_before_.reset();
  if (charged_account() == charged_) {
    charge_allocations_to(nullptr);
  }
}

}  // namespace castor
