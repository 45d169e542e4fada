#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "optim/update_rule.h"

namespace castor::cuda {

/// Enqueues one step of each segment on `stream` and returns: UpdateRule::update() on the device,
/// for a rule whose coefficients are an `Element`: LionElement, SgdElement<false> or
/// SgdElement<true>. What adam_update() (adam_kernel.h) says of memory and bits holds here too.
///
/// Throws InvalidArgument as the rule does, before anything is enqueued; CudaError when a launch is
/// refused.
template <typename Element>
void element_update(const UpdateRule& rule, std::span<const UpdateSegment> segments,
                    cudaStream_t stream);

}  // namespace castor::cuda
