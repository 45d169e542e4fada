#include "torch/torch_error.h"

#include <torch/csrc/autograd/function.h>

#include <array>
#include <string_view>

namespace castor {
namespace {

// How the core says where it is (Runtime::place_under_way).
constexpr std::array<std::string_view, 2> kPlaces = {"in the backward of module ",
                                                     "outside any module"};

std::string with_operation(const Error& error) {
  std::string message = error.what();
  const auto node = ::torch::autograd::get_current_node();
  if (node && dynamic_cast<const OutOfMemory*>(&error) != nullptr) {
    for (const std::string_view place : kPlaces) {
      if (const auto found = message.find(place); found != std::string::npos) {
        return message.insert(found, "In " + node->name() + ", ");
      }
    }
  }
  return message;
}

}  // namespace

PythonErrors& python_errors() noexcept {
  static PythonErrors errors;
  return errors;
}

OutOfMemoryFigures& last_out_of_memory() noexcept {
  thread_local OutOfMemoryFigures figures;
  return figures;
}

PyObject* python_class_of(const Error& error) noexcept {
  const PythonErrors& classes = python_errors();
  if (const auto* out_of_memory = dynamic_cast<const OutOfMemory*>(&error)) {
    last_out_of_memory() = {std::string(to_string(out_of_memory->tier())),
                            out_of_memory->requested(), out_of_memory->available(),
                            out_of_memory->budget()};
    return classes.out_of_memory_error;
  }
  if (dynamic_cast<const UsageError*>(&error) != nullptr) {
    return classes.usage_error;
  }
  if (dynamic_cast<const CorruptionError*>(&error) != nullptr) {
    return classes.corruption_error;
  }
  if (dynamic_cast<const IoError*>(&error) != nullptr) {
    return classes.io_error;
  }
  if (dynamic_cast<const InvalidArgument*>(&error) != nullptr) {
    return classes.invalid_argument;
  }
  return classes.error;
}

TorchError::TorchError(const Error& error)
    : ::torch::PyTorchError(with_operation(error)), type_(python_class_of(error)) {}

}  // namespace castor
