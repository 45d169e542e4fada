#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cuda_error.h"

namespace castor::cuda {

/// Scope in which `device` is this thread's current CUDA device; its destructor brings the one
/// before back. Events and streams are made on, and used with, the device they belong to.
class ScopedDevice {
 public:
  /// Throws CudaError, without changing anything, if there is no such device.
  explicit ScopedDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) {
      check(cudaSetDevice(device), "cudaSetDevice");
      changed_ = true;
    }
  }
  ~ScopedDevice() {
    if (changed_)
      static_cast<void>(cudaSetDevice(before_));  // was current a moment ago
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace castor::cuda
