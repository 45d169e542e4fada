#include "core/dry_run.h"

namespace castor {

void DryRun::step(const Event& event) {
  switch (event.kind) {
    case EventKind::kForwardEnter:
      frames_.begin_forward(ModuleId{event.id});
      frames_.enter_forward(ModuleId{event.id}, [this](std::vector<Pin>* pins) { access(pins); });
      break;
    case EventKind::kForwardExit:
      if (frames_.entered(ModuleId{event.id})) {
        frames_.exit_forward(ModuleId{event.id});
      }
      break;
    case EventKind::kBackwardEnter:
      frames_.end_backward();
      frames_.enter_backward(ModuleId{event.id}, [this](std::vector<Pin>* pins) { access(pins); });
      break;
    case EventKind::kGradReady: break;
  }
}

void DryRun::access(std::vector<Pin>* pins) {
  const PlannedAccess& access = plan_.accesses()[num_accesses_++];
  const auto& needed = layout_.chunks_of(access.module);
  const auto next_uses = plan_.next_uses(access, needed.size());
  for (std::size_t i = 0; i < needed.size(); ++i) {
    residency_.set_next_use(needed[i], next_uses[i]);
  }
  begin_access();
  pin_all(
      needed, residency_, pins,
      [&](ChunkId chunk) {
        make_room(residency_.capacity(chunk), access.slot_cap_bytes, 0);
        fetch(chunk);
        ++demand_fetches_;
      },
      [this](ChunkId chunk) {
        pinned(chunk);
        return residency_.pin(chunk);
      });
  // Also without a fetch: the non-model bytes of this access may need the room.
  make_room(0, access.slot_cap_bytes, 0);
  fetch_ahead();
}

void DryRun::fetch_ahead() {
  for (const Prefetch& ahead : plan_.prefetches(plan_.accesses()[now()])) {
    if (!residency_.resident(ahead.chunk) && !fetch_blocks(ahead.chunk)) {
      fetch_for(ahead.chunk, ahead.used_at, ahead.slot_cap_bytes);
    }
  }
}

void DryRun::fetch_for(ChunkId chunk, std::uint64_t used_at, std::size_t cap_bytes) {
  residency_.set_next_use(chunk, used_at);
  make_room(residency_.capacity(chunk), cap_bytes, used_at + 1);
  fetch(chunk);
}

void DryRun::make_room(std::size_t bytes, std::size_t cap_bytes, std::uint64_t horizon) {
  residency_.evict_until([&] { return residency_.slots_fit(bytes, cap_bytes); }, horizon,
                         [this](ChunkId victim) {
                           residency_.give_up_slot(victim);
                           ++evictions_;
                           evicted(victim);
                         });
}

void DryRun::fetch(ChunkId chunk) {
  residency_.take_slot(chunk);
  h2d_bytes_ += layout_.chunk(chunk).used_bytes;
  fetched(chunk);
}

}  // namespace castor
