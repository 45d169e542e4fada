#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/chunk_layout.h"
#include "core/module_frames.h"
#include "core/placement.h"
#include "core/planner.h"
#include "core/residency.h"
#include "core/trace.h"

namespace castor {

/// Simulation of a step by its plan, without memory or time: the slots and pins after each event,
/// as the runtime would have them. The planner derives from it to choose prefetches, the simulator
/// to compute times. Not thread-safe.
class DryRun {
 public:
  /// Begins with nothing in a slot. `layout` and `plan` outlive the dry run.
  DryRun(const ChunkLayout& layout, std::span<const Placement> placements, const Plan& plan)
      : layout_(layout), plan_(plan), residency_(layout, placements) {}
  virtual ~DryRun() = default;
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  /// Runs the next event of the plan's trace.
  void step(const Event& event);

  [[nodiscard]] const Residency& residency() const noexcept { return residency_; }
  [[nodiscard]] std::uint64_t demand_fetches() const noexcept { return demand_fetches_; }
  [[nodiscard]] std::uint64_t evictions() const noexcept { return evictions_; }
  [[nodiscard]] std::uint64_t h2d_bytes() const noexcept { return h2d_bytes_; }

 protected:
  /// Called before an access pins anything.
  virtual void begin_access() {}
  /// Called once an access has what it needs. Fetches what the plan says, except chunks for which
  /// fetch_blocks returns true.
  virtual void fetch_ahead();
  [[nodiscard]] virtual bool fetch_blocks(ChunkId /*chunk*/) const { return false; }
  virtual void fetched(ChunkId /*chunk*/) {}
  virtual void pinned(ChunkId /*chunk*/) {}
  virtual void evicted(ChunkId /*chunk*/) {}

  /// Makes room for a chunk and fetches it, for its use at a later access.
  void fetch_for(ChunkId chunk, std::uint64_t used_at, std::size_t cap_bytes);
  /// Returns whether fetch_for would keep to the cap, and evict only chunks that are used after
  /// `used_at`.
  [[nodiscard]] bool could_fetch_for(ChunkId chunk, std::uint64_t used_at,
                                     std::size_t cap_bytes) const {
    return residency_.could_fit(residency_.capacity(chunk), cap_bytes, used_at + 1);
  }
  /// Returns the number of accesses begun.
  [[nodiscard]] std::size_t num_accesses() const noexcept { return num_accesses_; }
  /// Returns the number of the latest access.
  [[nodiscard]] std::size_t now() const noexcept { return num_accesses_ - 1; }

 private:
  void access(std::vector<Pin>* pins);
  void make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon);
  void fetch(ChunkId chunk);

  const ChunkLayout& layout_;
  const Plan& plan_;
  Residency residency_;
  ModuleFrames frames_;
  std::size_t num_accesses_ = 0;
  std::uint64_t demand_fetches_ = 0;
  std::uint64_t evictions_ = 0;
  std::uint64_t h2d_bytes_ = 0;
};

}  // namespace castor
