#pragma once

#include <cstddef>
#include <span>

#include "core/io_engine.h"

namespace castor {

/// Checks the part of the contract of IoEngine::submit that all engines share. Throws
/// InvalidArgument when the requests do not fit the queue, name a file that does not exist, or move
/// nothing.
void check_requests(std::span<const IoRequest> requests, std::size_t num_files,
                    std::size_t in_flight, std::size_t queue_depth);

}  // namespace castor
