#include "torch/torch_error.h"

namespace castor {

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

}  // namespace castor
