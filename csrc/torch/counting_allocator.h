#pragma once

namespace castor {

/// Accounting of CPU tensors as device memory, for the CPU device. A counting allocator wraps the
/// one that torch uses. It charges allocations of threads that work for a boosted model to that
/// model's NonModelMemory (charged_account), which may evict chunks or raise. It passes all others
/// through untouched. The memory events of torch.profiler come from the wrapped allocator and stay
/// right.

/// Puts the allocator in place, once per process. The allocator stays: tensors may hold its memory.
void install_counting_allocator();

/// Gives back what was charged for the live allocation that begins at `data`, if anything was:
/// somebody else pays for it from now on. Requires install_counting_allocator().
void stop_charging_for(void* data) noexcept;

}  // namespace castor
