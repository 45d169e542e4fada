#include "cuda/cuda_error.h"

namespace castor::cuda {

std::string describe(cudaError_t code) {
  return std::string(cudaGetErrorName(code)) + " (" + std::to_string(static_cast<int>(code)) +
         "): " + cudaGetErrorString(code);
}

CudaError::CudaError(cudaError_t code, const std::string& what_failed)
    : Error(what_failed + " failed: " + describe(code)), code_(code) {}

int runtime_version() {
  int version = 0;
  check(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  return version;
}

}  // namespace castor::cuda
