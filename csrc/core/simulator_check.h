#pragma once

#include <span>
#include <string>

#include "core/chunk_layout.h"
#include "core/placement.h"
#include "core/planner.h"
#include "core/trace.h"

namespace castor {

/// Throws InvalidArgument with the message unless `holds`.
void require_of_simulation(bool holds, const std::string& message);

/// Throws InvalidArgument where the arguments of simulate_step do not belong together, or a
/// duration is negative or not finite.
void check_simulation(const Trace& trace, std::span<const double> compute_seconds,
                      const ChunkLayout& layout, std::span<const Placement> placements,
                      const Plan& plan);

}  // namespace castor
