#pragma once

#include <memory>

#include "store/device_backend.h"

namespace castor::testing {

/// From now on every CPU allocation of torch counts as one on the simulated device, for `account`,
/// until that is gone; for one account at a time.
void follow_torch_allocations(const std::shared_ptr<DeviceAccount>& account);

/// Whether this thread's allocations count: those of a test that looks at results do not, as they
/// would be in host memory beside a GPU.
void count_allocations(bool counted);

/// The n-th allocation from now on (the first is 1) is refused by the device once: its account is
/// asked to evict, and it is tried again. 0: none. Gives how many refusals there were before.
std::size_t refuse_allocation(std::size_t n);

}  // namespace castor::testing
