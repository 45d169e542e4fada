#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "optim/adam.h"

namespace castor::cuda {

/// Enqueues one Adam step of each segment on `stream` and returns: adam_update() on the device. All
/// arrays are readable and writable by the device of `stream`, and no two may overlap. Work that
/// follows on `stream` may use the arrays again.
///
/// The bits are those of adam_update(), so that a chunk may change sides between steps. There are
/// two exceptions:
/// - A NaN is a NaN on both sides, perhaps of different bits.
/// - A product or quotient that lies less than 2^-150 below the smallest normal number may be
///   flushed to zero on one side and rounded up on the other (docs/design/0015).
///
/// Throws InvalidArgument as adam_update() does, before anything is enqueued; CudaError when a
/// launch is refused.
void adam_update(std::span<const AdamSegment> segments, cudaStream_t stream);

}  // namespace castor::cuda
