#pragma once

#include <memory>
#include <string>

#include "core/collectives.h"

namespace castor {

/// Collectives of a process group that torch.distributed has made, by its name there, over host
/// memory (its backend for the CPU, gloo). Throws UsageError where there is no such group, or no
/// such backend. May be called, and its calls be made, with or without Python's lock, which must
/// not be held where others need it to arrive.
[[nodiscard]] std::shared_ptr<Collectives> group_collectives(const std::string& group);

}  // namespace castor
