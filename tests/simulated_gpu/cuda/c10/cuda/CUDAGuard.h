#pragma once

// torch's header of that name, as far as castor's sources use it: there is one simulated GPU.

#include <c10/core/StreamGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace c10::cuda {

class CUDAGuard {
 public:
  explicit CUDAGuard(DeviceIndex) {}
  explicit CUDAGuard(Device) {}
};

class CUDAStreamGuard {
 public:
  explicit CUDAStreamGuard(CUDAStream stream) : guard_(stream.unwrap()) {}
  explicit CUDAStreamGuard(c10::Stream stream) : guard_(stream) {}

 private:
  c10::StreamGuard guard_;
};

}  // namespace c10::cuda
