#include "torch/step_hooks.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "torch/torch_error.h"

namespace castor {
namespace {

/// Entry into a module's backward. Belongs to the hook on the function that made the module's
/// output; the hooks on several functions share one: the first to fire in a backward pass enters
/// the module.
class BackwardEntry {
 public:
  BackwardEntry(const std::shared_ptr<StepEvents>& events, ModuleId module)
      : events_(events), module_(module), origin_(events->origin()) {}

  void fire() {
    const int pass = ::torch::autograd::get_current_graph_task_id();
    if (std::exchange(last_pass_, pass) == pass) {
      return;
    }
    if (const auto events = events_.lock()) {
      for_torch([&] { events->enter_backward(module_, origin_); });
    }
  }

 private:
  std::weak_ptr<StepEvents> events_;
  ModuleId module_;
  PassTurn::Origin origin_;
  int last_pass_ = -1;
};

class BackwardHook final : public ::torch::autograd::FunctionPreHook {
 public:
  BackwardHook(const std::shared_ptr<StepEvents>& events, ModuleId module)
      : entry_(events, module) {}

  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& grads) override {
    entry_.fire();
    return grads;
  }

 private:
  BackwardEntry entry_;  // within the hook: most modules have one output
};

class SharedBackwardHook final : public ::torch::autograd::FunctionPreHook {
 public:
  explicit SharedBackwardHook(std::shared_ptr<BackwardEntry> entry) : entry_(std::move(entry)) {}

  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& grads) override {
    entry_->fire();
    return grads;
  }

 private:
  std::shared_ptr<BackwardEntry> entry_;
};

class GradientHook final : public ::torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::weak_ptr<StepEvents> events, ParamId param)
      : events_(std::move(events)), param_(param) {}

  ::torch::autograd::variable_list operator()(
      const ::torch::autograd::variable_list& outputs,
      const ::torch::autograd::variable_list& inputs) override {
    if (const auto events = events_.lock()) {
      for_torch([&] { events->gradient_arrived(param_, inputs.at(0)); });
    }
    return outputs;
  }

 private:
  std::weak_ptr<StepEvents> events_;
  ParamId param_;
};

}  // namespace

void watch_backward(const std::shared_ptr<StepEvents>& events, ModuleId module,
                    std::span<const at::Tensor> outputs) {
  c10::SmallVector<torch_versions::NodePointer, 4> functions;
  for (const at::Tensor& output : outputs) {
    if (auto function = output.grad_fn();
        function && (functions.empty() || functions.back() != function)) {
      functions.push_back(std::move(function));
    }
  }
  if (functions.empty()) {
    return;
  }
  if (functions.size() == 1) {
    functions.front()->add_tensor_pre_hook(std::make_unique<BackwardHook>(events, module));
    return;
  }
  const auto entry = std::make_shared<BackwardEntry>(events, module);
  for (const auto& function : functions) {
    function->add_tensor_pre_hook(std::make_unique<SharedBackwardHook>(entry));
  }
}

torch_versions::NodePointer watch_gradient(std::weak_ptr<StepEvents> events, ParamId param,
                                           const at::Tensor& leaf) {
  torch_versions::NodePointer accumulator = ::torch::autograd::impl::grad_accumulator(leaf);
  accumulator->add_post_hook(std::make_unique<GradientHook>(std::move(events), param));
  return accumulator;
}

}  // namespace castor
