#include "core/simulator_check.h"

#include <cmath>
#include <cstddef>
#include <string>

#include "core/error.h"

namespace castor {

namespace {

/// Where a message is worth making only when it is needed: for each event.
[[noreturn]] void refuse_simulation(const std::string& message) {
  throw InvalidArgument("simulator: " + message);
}

}  // namespace

void require_of_simulation(bool holds, const std::string& message) {
  if (!holds) {
    refuse_simulation(message);
  }
}

void check_simulation(const Trace& trace, std::span<const double> compute_seconds,
                      const ChunkLayout& layout, std::span<const Placement> placements,
                      const Plan& plan) {
  require_of_simulation(compute_seconds.size() == trace.events().size(),
                        "there are " + std::to_string(trace.events().size()) + " events but " +
                            std::to_string(compute_seconds.size()) + " durations");
  require_of_simulation(placements.size() == layout.chunks().size(),
                        "there are " + std::to_string(layout.chunks().size()) + " chunks but " +
                            std::to_string(placements.size()) + " placements");
  std::size_t access = 0;
  for (const Event& event : trace.events()) {
    if (event.kind == EventKind::kGradReady && event.id >= layout.chunks().size()) {
      refuse_simulation("the trace names chunk " + std::to_string(event.id) + " of " +
                        std::to_string(layout.chunks().size()));
    }
    if (event.is_access()) {
      if (access >= plan.accesses().size() ||
          plan.accesses()[access].module != ModuleId{event.id} ||
          plan.accesses()[access].kind != event.kind) {
        refuse_simulation("the plan was made from another trace: they part at access " +
                          std::to_string(access));
      }
      ++access;
    }
  }
  require_of_simulation(access == plan.accesses().size(),
                        "the plan has more accesses than the trace");
  for (const double seconds : compute_seconds) {
    if (!(std::isfinite(seconds) && seconds >= 0.0)) {
      refuse_simulation("a duration is " + std::to_string(seconds) + " s; it must be at least 0");
    }
  }
}

}  // namespace castor
