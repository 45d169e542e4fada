#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/error.h"

namespace castor::cuda {

/// Error of the CUDA runtime, which refused a call or reported a failure of earlier work:
/// "cudaMemcpyAsync of 2.00 MiB ... failed: cudaErrorIllegalAddress (700): an illegal memory access
/// was encountered". Python: castor.Error.
class CudaError : public Error {
 public:
  CudaError(cudaError_t code, const std::string& what_failed);

  [[nodiscard]] cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

/// Returns a text such as "cudaErrorMemoryAllocation (2): out of memory".
[[nodiscard]] std::string describe(cudaError_t code);

/// Returns the version of the CUDA runtime in this process: 13000 is 13.0. Needs no device. Throws
/// CudaError.
[[nodiscard]] int runtime_version();

/// Throws CudaError unless `code` is success. `what` names the call that was tried.
inline void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess)
    throw CudaError(code, what);
}

}  // namespace castor::cuda
