#include "torch/saved_variables.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include <memory>
#include <string>

#include "core/error.h"

namespace castor {

void release_saved_variables(PyObject* node) {
  if (::torch::autograd::THPCppFunction_Check(node)) {
    reinterpret_cast<::torch::autograd::THPCppFunction*>(node)->cdata->release_variables();
  } else if (THPFunction_Check(node)) {
    // As a Node: the sanitizer asks a PyNode for what torch does not export.
    using ::torch::autograd::Node;
    if (const std::shared_ptr<Node> of_python =
            reinterpret_cast<THPFunction*>(node)->cdata.lock()) {
      of_python->release_variables();
    }
  } else {
    throw UsageError(std::string("a ") + Py_TYPE(node)->tp_name + " is no node of autograd's");
  }
}

}  // namespace castor
