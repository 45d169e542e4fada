#pragma once

// Internal to csrc/optim.

#include "optim/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace castor::detail {

/// Scope in which this thread rounds to nearest and takes subnormal operands and results as zero;
/// the destructor restores the old mode. It spares the loops the 100x cost of a subnormal, and
/// makes the bits independent of the calling thread's mode. Worker threads do not inherit the mode,
/// so each task has a scope of its own.
class ScopedFlushToZero {
 public:
#if defined(__x86_64__)
  ScopedFlushToZero() noexcept : saved_(_mm_getcsr()) { _mm_setcsr(kMasked | kFtz | kDaz); }
  ~ScopedFlushToZero() { _mm_setcsr(saved_); }
#else
  ScopedFlushToZero() noexcept {}  // subnormals are computed as IEEE 754 has them
  ~ScopedFlushToZero() {}
#endif
  ScopedFlushToZero(const ScopedFlushToZero&) = delete;
  ScopedFlushToZero& operator=(const ScopedFlushToZero&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kMasked = 0x1f80;  // all exceptions masked, none flagged, to nearest
  static constexpr unsigned kFtz = 0x8000;
  static constexpr unsigned kDaz = 0x0040;
  unsigned saved_;
#endif
};

// One body, stamped out for each instruction set: the body's operator() is always_inline, so the
// vectoriser works on it with the target of the function that holds it. -ffp-contract=off
// (CMakeLists.txt) keeps the compiler from fusing a multiply-add that the source does not ask for
// (multiply_add.h).

template <typename Body>
[[gnu::noinline]] void run_baseline(const Body& body) {
  body();
}

#if defined(__x86_64__)
template <typename Body>
[[gnu::noinline, gnu::target("avx2,fma")]] void run_avx2(const Body& body) {
  body();
}

template <typename Body>
[[gnu::noinline, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]] void run_avx512(
    const Body& body) {
  body();
}
#endif

/// Runs body() compiled for `isa`, which must be one of supported_isas(), with the rounding mode of
/// the thread.
template <typename Body>
void run_as_is_on(Isa isa, const Body& body) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512: return run_avx512(body);
    case Isa::kAvx2: return run_avx2(body);
#endif
    default: return run_baseline(body);
  }
}

/// Runs body() compiled for `isa`, rounding to nearest and flushing subnormals.
template <typename Body>
void run_on(Isa isa, const Body& body) {
  const ScopedFlushToZero flush;
  run_as_is_on(isa, body);
}

}  // namespace castor::detail
