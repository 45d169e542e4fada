#include "torch/passes.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <string_view>
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

Passes::Passes(const Runtime& runtime, std::shared_ptr<NonModelMemory> charged)
    : runtime_(runtime), charged_(std::move(charged)) {
  PassTurn::number_threads_by([] { return static_cast<long>(::syscall(SYS_gettid)); });
}

PassTurn::Caller Passes::caller() {
  thread_local const bool shared = [] {
    std::array<char, 16> name{};
    return ::pthread_getname_np(::pthread_self(), name.data(), name.size()) == 0 &&
           std::string_view(name.data()).starts_with("pt_autograd");
  }();
  return {.shared = shared, .task = ::torch::autograd::get_current_graph_task_id()};
}

// Memory that the thread allocates after backward (the next micro-batch's data, a user's clipping
// on the host) is not the model's. Autograd drops the callback with the pass, also when the pass
// failed.
void Passes::follow(const Joined& joined) {
  if (joined.task_is_new) {
    auto end =
        std::make_shared<End>(weak_from_this(), ::torch::autograd::get_current_graph_task_id());
    ::torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::move(end)] { end->reached(); });
  }
}

Passes::Joined Passes::begin_forward() {
  const bool trains = at::GradMode::is_enabled();
  const Joined joined = turn_.enter_forward(
      caller(), trains ? PassTurn::Mode::kTraining : PassTurn::Mode::kInference);
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
  if (!at::GradMode::is_enabled()) {
    charge_allocations_to(std::exchange(account_before_, nullptr));
  }
  turn_.end_forward();
}

bool Passes::in_segment() const { return forward_trains_ && !at::GradMode::is_enabled(); }

bool Passes::mine() const { return turn_.mine(caller()); }

// A second forward that stopped early is within a pass: backward goes on behind it.
void Passes::stop_charging() {
  if (!abandoned_ && charged_ && charged_account() == charged_ && !turn_.in_pass(caller())) {
    charge_allocations_to(nullptr);
  }
}

Passes::Joined Passes::begin_backward(PassTurn::Origin origin) {
  const Joined joined = follow_backward(origin);
  charge_allocations_to(charged_);
  return joined;
}

Passes::Joined Passes::follow_backward(PassTurn::Origin origin) {
  const Joined joined = turn_.join_backward(caller(), origin);
  follow(joined);
  return joined;
}

Passes::Joined Passes::begin_section(PassTurn::Section kind, const std::string& what) {
  const Joined joined = turn_.enter_section(caller(), kind, what);
  follow(joined);
  return joined;
}

void Passes::backward_done(int pass) {
  if (!abandoned_ && at_backward_end_ && turn_.only_task(pass)) {
    for_torch(at_backward_end_);
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
