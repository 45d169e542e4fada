#include "torch/step_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "torch/torch_error.h"

namespace castor {
namespace {

/// Shared by the hooks on all outputs of one forward call: the first one to fire in a backward
/// pass enters the module.
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
  explicit BackwardHook(std::shared_ptr<BackwardEntry> entry) : entry_(std::move(entry)) {}

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

using GradFunctions = std::vector<torch_versions::NodePointer>;

// Outputs are shallow; the bound stops cycles through objects.
constexpr int kMaxDepth = 6;

void add_grad_function(const at::Tensor& tensor, GradFunctions* found) {
  if (auto function = tensor.grad_fn()) {
    if (found->empty() || found->back() != function) {
      found->push_back(std::move(function));
    }
  }
}

void find_grad_functions(PyObject* value, int depth, GradFunctions* found);

void find_in_dict(PyObject* dict, int depth, GradFunctions* found) {
  Py_ssize_t position = 0;
  PyObject* item = nullptr;
  while (PyDict_Next(dict, &position, nullptr, &item) != 0) {
    find_grad_functions(item, depth, found);
  }
}

void find_grad_functions(PyObject* value, int depth, GradFunctions* found) {
  if (THPVariable_Check(value)) {
    add_grad_function(THPVariable_Unpack(value), found);
    return;
  }
  if (depth == 0 || value == Py_None || PyUnicode_Check(value) || PyLong_Check(value) ||
      PyFloat_Check(value)) {
    return;
  }
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      find_grad_functions(PyTuple_GET_ITEM(value, i), depth - 1, found);
    }
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      find_grad_functions(PyList_GET_ITEM(value, i), depth - 1, found);
    }
  } else if (PyDict_Check(value)) {
    find_in_dict(value, depth - 1, found);
  } else if (!PyType_Check(value) && !PyModule_Check(value) && !PyCallable_Check(value)) {
    PyObject* attributes = PyObject_GenericGetDict(value, nullptr);
    if (attributes == nullptr) {
      PyErr_Clear();
      return;
    }
    find_in_dict(attributes, depth - 1, found);
    Py_DECREF(attributes);
  }
}

void watch_functions(const std::shared_ptr<StepEvents>& events, ModuleId module,
                     const GradFunctions& functions) {
  if (functions.empty()) {
    return;
  }
  const auto entry = std::make_shared<BackwardEntry>(events, module);
  for (const auto& function : functions) {
    function->add_tensor_pre_hook(std::make_unique<BackwardHook>(entry));
  }
}

}  // namespace

void watch_backward(const std::shared_ptr<StepEvents>& events, ModuleId module, PyObject* output) {
  GradFunctions functions;
  find_grad_functions(output, kMaxDepth, &functions);
  watch_functions(events, module, functions);
}

void watch_backward(const std::shared_ptr<StepEvents>& events, ModuleId module,
                    std::span<const at::Tensor> outputs) {
  GradFunctions functions;
  for (const at::Tensor& output : outputs) {
    add_grad_function(output, &functions);
  }
  watch_functions(events, module, functions);
}

torch_versions::NodePointer watch_gradient(std::weak_ptr<StepEvents> events, ParamId param,
                                           const at::Tensor& leaf) {
  torch_versions::NodePointer accumulator = ::torch::autograd::impl::grad_accumulator(leaf);
  accumulator->add_post_hook(std::make_unique<GradientHook>(std::move(events), param));
  return accumulator;
}

}  // namespace castor
