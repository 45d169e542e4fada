#include "python/module_hooks.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <cstddef>
#include <exception>
#include <utility>

#include "torch/step_hooks.h"

namespace py = pybind11;

namespace castor {
namespace {

// Outputs are shallow; the bound stops cycles through objects.
constexpr int kMaxDepth = 6;

using Tensors = c10::SmallVector<at::Tensor, 4>;

void find_tensors(PyObject* value, int depth, Tensors* found);

void find_in_dict(PyObject* dict, int depth, Tensors* found) {
  Py_ssize_t position = 0;
  PyObject* item = nullptr;
  while (PyDict_Next(dict, &position, nullptr, &item) != 0) {
    find_tensors(item, depth, found);
  }
}

/// Adds the tensors in what a forward returned: in tuples, lists, dicts, dataclasses and other
/// objects with a __dict__. `value` is a borrowed reference.
void find_tensors(PyObject* value, int depth, Tensors* found) {
  if (THPVariable_Check(value)) {
    found->push_back(THPVariable_Unpack(value));
    return;
  }
  if (depth == 0 || value == Py_None || PyUnicode_Check(value) || PyLong_Check(value) ||
      PyFloat_Check(value)) {
    return;
  }
  if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
      find_tensors(PyTuple_GET_ITEM(value, i), depth - 1, found);
    }
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      find_tensors(PyList_GET_ITEM(value, i), depth - 1, found);
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

/// A module of a model, and who is told of its forward.
struct Followed {
  std::shared_ptr<StepEvents> events;
  ModuleId module;
  bool owns_params = false;

  void enter() const {
    const py::gil_scoped_release release;
    events->enter(module);
  }

  /// `output`: None where forward has failed.
  void leave(PyObject* output) const {
    if (owns_params && at::GradMode::is_enabled()) {
      Tensors tensors;
      find_tensors(output, kMaxDepth, &tensors);
      watch_backward(events, module, {tensors.data(), tensors.size()});
    }
    const bool no_result = output == Py_None;
    const py::gil_scoped_release release;
    events->exit(module);
    if (no_result) {
      events->expect_no_backward();
    }
  }
};

Followed followed(const std::shared_ptr<StepEvents>& events, std::uint32_t module) {
  return {events, ModuleId{module}, !events->layout().module(ModuleId{module}).params.empty()};
}

/// In Python's hands: the C structs of its types have no constructors.
struct ModuleCall {
  PyObject_HEAD vectorcallfunc call;
  Followed* followed;
  PyObject* owner;  // weakly
  PyObject* enter;  // the hooks' numbers
  PyObject* leave;
};

/// torch.nn.Module's own names, and the hooks that every module has.
struct TorchNames {
  std::array<PyObject*, 2> backward;  // registries that have to be empty
  std::array<PyObject*, 4> global;    // the same, torch's own
  PyObject* pre_hooks;
  PyObject* hooks;
  PyObject* forward;
  PyObject* own_call;
};

const TorchNames& torch_names() {
  static const TorchNames* const names = [] {
    const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
    const py::module_ torch = py::module_::import("torch.nn.modules.module");
    const auto global = [&](const char* text) {
      return py::object(torch.attr(text)).release().ptr();
    };
    return new TorchNames{
        .backward = {name("_backward_hooks"), name("_backward_pre_hooks")},
        .global = {global("_global_forward_hooks"), global("_global_forward_pre_hooks"),
                   global("_global_backward_hooks"), global("_global_backward_pre_hooks")},
        .pre_hooks = name("_forward_pre_hooks"),
        .hooks = name("_forward_hooks"),
        .forward = name("forward"),
        .own_call = name("_call_impl")};
  }();
  return *names;
}

/// Whether the registry has this hook, and no other. Borrows; raises nothing. Torch keeps a hook
/// under the very number that its handle has.
bool only(PyObject* attributes, PyObject* registry, PyObject* hook) {
  PyObject* const hooks = PyDict_GetItemWithError(attributes, registry);
  Py_ssize_t position = 0;
  PyObject* number = nullptr;
  return hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 1 &&
         PyDict_Next(hooks, &position, &number, nullptr) != 0 && number == hook;
}

bool empty(PyObject* hooks) {
  return hooks != nullptr && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0;
}

/// Whether torch's own call would do what this one does: our two hooks, forward between them.
bool has_only_our_hooks(const ModuleCall& self, PyObject* attributes, const TorchNames& names) {
  if (!only(attributes, names.pre_hooks, self.enter) ||
      !only(attributes, names.hooks, self.leave) || ::torch::jit::tracer::isTracing()) {
    return false;
  }
  for (PyObject* const registry : names.backward) {
    if (!empty(PyDict_GetItemWithError(attributes, registry))) {
      return false;
    }
  }
  for (PyObject* const hooks : names.global) {
    if (!empty(hooks)) {
      return false;
    }
  }
  return true;
}

/// Runs `work`; where it throws, what that is in Python is raised there and this returns false.
template <typename Work>
bool for_python(const Work& work) {
  thread_local std::exception_ptr pending;
  try {
    work();
    return true;
  } catch (...) {
    pending = std::current_exception();
  }
  // The binding's own translation stands around its functions.
  static PyObject* const rethrow =
      py::cpp_function([] { std::rethrow_exception(std::exchange(pending, nullptr)); })
          .release()
          .ptr();
  PyObject* const none = PyObject_CallNoArgs(rethrow);
  (void)none;  // it always throws
  return false;
}

/// As torch's own call, without other hooks: the hook behind forward runs whatever happened.
PyObject* call_between_events(const ModuleCall& self, PyObject* owner, PyObject* const* arguments,
                              std::size_t num_arguments, PyObject* keywords) {
  const Followed& module = *self.followed;
  PyObject* output = nullptr;
  if (for_python([&] { module.enter(); })) {
    if (PyObject* const forward = PyObject_GetAttr(owner, torch_names().forward)) {
      output = PyObject_Vectorcall(forward, arguments, num_arguments, keywords);
      Py_DECREF(forward);
    }
  }
  if (output != nullptr) {
    if (!for_python([&] { module.leave(output); })) {
      Py_CLEAR(output);
    }
    return output;
  }
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  if (!for_python([&] { module.leave(Py_None); })) {
    PyErr_WriteUnraisable(owner);
  }
  PyErr_Restore(type, value, traceback);
  return nullptr;
}

PyObject* call_module(PyObject* object, PyObject* const* arguments, std::size_t num_arguments,
                      PyObject* keywords) {
  const auto& self = *reinterpret_cast<ModuleCall*>(object);
  PyObject* const owner = PyWeakref_GetObject(self.owner);
  if (owner == Py_None) {
    PyErr_SetString(PyExc_ReferenceError, "the module of this call is gone");
    return nullptr;
  }
  const py::object alive = py::reinterpret_borrow<py::object>(owner);
  const TorchNames& names = torch_names();
  PyObject* const attributes = PyObject_GenericGetDict(owner, nullptr);
  if (attributes == nullptr) {
    return nullptr;
  }
  const bool direct = has_only_our_hooks(self, attributes, names);
  Py_DECREF(attributes);
  if (direct) {
    return call_between_events(self, owner, arguments, num_arguments, keywords);
  }
  PyObject* const own_call = PyObject_GetAttr(owner, names.own_call);
  if (own_call == nullptr) {
    return nullptr;
  }
  PyObject* const output = PyObject_Vectorcall(own_call, arguments, num_arguments, keywords);
  Py_DECREF(own_call);
  return output;
}

void free_call(PyObject* object) {
  auto* const self = reinterpret_cast<ModuleCall*>(object);
  delete self->followed;
  Py_XDECREF(self->owner);
  Py_XDECREF(self->enter);
  Py_XDECREF(self->leave);
  PyTypeObject* const type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyTypeObject* call_type() {
  static PyTypeObject* const type = [] {
    static std::array<PyMemberDef, 2> members{
        {{"__vectorcalloffset__", T_PYSSIZET, offsetof(ModuleCall, call), READONLY, nullptr}, {}}};
    static std::array<PyType_Slot, 4> slots{
        {{Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
         {Py_tp_dealloc, reinterpret_cast<void*>(&free_call)},
         {Py_tp_members, members.data()},
         {}}};
    static PyType_Spec spec{.name = "castor._C.ModuleCall",
                            .basicsize = sizeof(ModuleCall),
                            .itemsize = 0,
                            .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL |
                                     Py_TPFLAGS_DISALLOW_INSTANTIATION,
                            .slots = slots.data()};
    PyObject* const made = PyType_FromSpec(&spec);
    if (made == nullptr) {
      throw py::error_already_set();
    }
    return reinterpret_cast<PyTypeObject*>(made);
  }();
  return type;
}

}  // namespace

py::cpp_function forward_pre_hook(const std::shared_ptr<StepEvents>& events, std::uint32_t module,
                                  const py::handle& owner) {
  return {[module = followed(events, module), owner](const py::handle& called,
                                                     const py::handle& /*args*/) {
    if (called.is(owner)) {
      module.enter();
    }
  }};
}

py::cpp_function forward_hook(const std::shared_ptr<StepEvents>& events, std::uint32_t module,
                              const py::handle& owner) {
  return {[module = followed(events, module), owner](
              const py::handle& called, const py::handle& /*args*/, const py::handle& output) {
    if (called.is(owner)) {
      module.leave(output.ptr());
    }
  }};
}

py::object module_call(const std::shared_ptr<StepEvents>& events, std::uint32_t module,
                       const py::object& owner, const py::int_& enter, const py::int_& leave) {
  static_cast<void>(torch_names());  // what torch lacks is an error here, not within a call
  PyTypeObject* const type = call_type();
  const py::object made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  PyObject* const weak = made ? PyWeakref_NewRef(owner.ptr(), nullptr) : nullptr;
  if (weak == nullptr) {
    throw py::error_already_set();
  }
  auto* const self = reinterpret_cast<ModuleCall*>(made.ptr());
  self->call = &call_module;
  self->followed = new Followed(followed(events, module));
  self->owner = weak;
  self->enter = py::int_(enter).release().ptr();
  self->leave = py::int_(leave).release().ptr();
  return made;
}

py::type module_call_type() {
  return py::reinterpret_borrow<py::type>(reinterpret_cast<PyObject*>(call_type()));
}

}  // namespace castor
