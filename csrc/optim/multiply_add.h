#pragma once

// Internal to csrc/optim and the CUDA kernels.

#include "optim/elementwise.h"

namespace castor::detail {

/// Returns a * b + c, rounded once, on every instruction set. Where the processor has AVX2, torch's
/// add with an alpha is `other * alpha + self` in one instruction, vectorised or not. A rule that
/// has to give torch's bits has to fuse where torch does, and nowhere else. Without the instruction
/// (the baseline of x86-64) the C library computes the same bits, slowly.
[[nodiscard]] CASTOR_ELEMENTWISE float multiply_add(float a, float b, float c) noexcept {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

}  // namespace castor::detail
