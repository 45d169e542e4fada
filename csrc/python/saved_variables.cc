#include "python/saved_variables.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include <string>

#include "core/error.h"
#include "torch/torch_versions.h"

namespace castor {

void release_saved_variables(PyObject* node) {
  if (::torch::autograd::THPCppFunction_Check(node)) {
    reinterpret_cast<::torch::autograd::THPCppFunction*>(node)->cdata->release_variables();
  } else if (THPFunction_Check(node)) {
    // Through the base class Node: torch does not export the type information of PyNode, which the
    // undefined behaviour sanitizer asks for.
    const torch_versions::NodePointer function =
        torch_versions::lock(reinterpret_cast<THPFunction*>(node)->cdata);
    if (function) {
      function->release_variables();
    }
  } else {
    throw UsageError(std::string("a ") + Py_TYPE(node)->tp_name + " is no node of autograd's");
  }
}

}  // namespace castor
