#include "core/trace.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace castor {

Trace::Trace(std::vector<Event> events) : events_(std::move(events)) {
  constexpr std::uint64_t kFnvPrime = 1099511628211ULL;
  signature_ = 14695981039346656037ULL;
  for (const Event& event : events_) {
    peak_nonmodel_bytes_ = std::max(peak_nonmodel_bytes_, event.nonmodel_bytes);
    if (event.is_access()) {
      ++num_accesses_;
      const std::uint64_t word =
          (std::uint64_t{event.id} << 8) | static_cast<std::uint64_t>(event.kind);
      signature_ = (signature_ ^ word) * kFnvPrime;
    }
  }
}

Trace Trace::merged_with(const Trace& other) const {
  if (other.events_.size() != events_.size()) {
    throw InvalidArgument("cannot merge traces of " + std::to_string(events_.size()) + " and " +
                          std::to_string(other.events_.size()) + " events");
  }
  std::vector<Event> merged = other.events_;
  for (std::size_t i = 0; i < merged.size(); ++i) {
    merged[i].nonmodel_bytes = std::max(merged[i].nonmodel_bytes, events_[i].nonmodel_bytes);
  }
  return Trace(std::move(merged));
}

void Tracer::record(EventKind kind, std::uint32_t id, std::uint64_t nonmodel_bytes,
                    std::uint64_t now_ns) {
  if (!complete()) {
    return;
  }
  if (events_.empty()) {
    start_ns_ = now_ns;
  } else {
    events_.back().nonmodel_bytes = nonmodel_bytes;
  }
  events_.push_back({kind, id, 0, now_ns - start_ns_});
}

Trace Tracer::finish(std::uint64_t nonmodel_bytes) {
  if (!events_.empty()) {
    events_.back().nonmodel_bytes = nonmodel_bytes;
  }
  std::vector<Event> finished;
  finished.reserve(events_.size());  // the next step will have as many
  finished.swap(events_);
  return Trace(std::move(finished));
}

}  // namespace castor
