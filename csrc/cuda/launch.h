#pragma once

// Internal to csrc/cuda, for nvcc only.

#include <cuda_runtime.h>

#include "cuda/cuda_error.h"

namespace castor::cuda {

/// Enqueues a kernel. Throws CudaError, which names `what`. Does not use <<<>>>: its error comes
/// from cudaGetLastError, which would also report, and clear, the errors that other code left
/// there.
template <typename... Parameters, typename... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), unsigned num_blocks,
            unsigned num_threads, cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_blocks);
  config.blockDim = dim3(num_threads);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), what);
}

}  // namespace castor::cuda
