#pragma once

// Internal to csrc/optim and the CUDA kernels.

/// Attributes of the functions of one element. A CPU loop must inline them, to compile them for its
/// own instruction set; nvcc compiles them for the device as well, so that both sides run one
/// source.
#if defined(__CUDACC__)
#define CASTOR_ELEMENTWISE __host__ __device__ __forceinline__
#else
#define CASTOR_ELEMENTWISE [[gnu::always_inline]] inline
#endif
