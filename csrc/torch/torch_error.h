#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <string>

#include "core/error.h"

namespace castor {

/// Python classes that castor's C++ exceptions become. Set once at import, never freed.
struct PythonErrors {
  PyObject* error = nullptr;
  PyObject* usage_error = nullptr;
  PyObject* out_of_memory_error = nullptr;
  PyObject* io_error = nullptr;
  PyObject* corruption_error = nullptr;
  PyObject* invalid_argument = nullptr;
};

[[nodiscard]] PythonErrors& python_errors() noexcept;

/// Figures of the last OutOfMemory that left this thread for Python, in bytes. Its Python class
/// reads them.
struct OutOfMemoryFigures {
  std::string tier;
  std::size_t requested = 0;
  std::size_t available = 0;
  std::size_t budget = 0;
};

[[nodiscard]] OutOfMemoryFigures& last_out_of_memory() noexcept;

/// Returns the Python class for `error`; remembers the figures of an OutOfMemory.
[[nodiscard]] PyObject* python_class_of(const Error& error) noexcept;

/// Castor error on its way through torch's C++ (an allocation, an autograd hook): torch turns it
/// into the Python exception of python_type(). An OutOfMemory within a backward pass names
/// autograd's operation, of which Python has no frame.
class TorchError final : public ::torch::PyTorchError {
 public:
  explicit TorchError(const Error& error);
  PyObject* python_type() override { return type_; }

 private:
  PyObject* type_;
};

/// Runs `body` where torch is the caller: castor errors leave as TorchError.
template <typename Body>
decltype(auto) for_torch(Body&& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw TorchError(error);
  }
}

}  // namespace castor
