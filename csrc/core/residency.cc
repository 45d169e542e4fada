#include "core/residency.h"

#include <cassert>
#include <string>

#include "core/error.h"

namespace castor {

Residency::Residency(const ChunkLayout& layout, std::span<const Placement> placements)
    : chunks_(layout.chunks().size()), evictable_(layout.chunks().size()) {
  if (placements.size() != chunks_.size()) {
    throw InvalidArgument("there are " + std::to_string(chunks_.size()) + " chunks but " +
                          std::to_string(placements.size()) + " placements");
  }
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    chunks_[i].capacity_bytes = layout.chunks()[i].capacity_bytes;
    chunks_[i].placement = placements[i];
  }
}

void Residency::may_leave(ChunkId chunk) {
  if (placement(chunk) == Placement::kStream) {
    evictable_.put(chunk, next_use(chunk));
  }
}

void Residency::set_next_use(ChunkId chunk, std::uint64_t next_use) {
  chunks_[index(chunk)].next_use = next_use;
  if (evictable_.contains(chunk)) {
    evictable_.put(chunk, next_use);
  }
}

void Residency::take_slot(ChunkId chunk) {
  assert(!resident(chunk));
  chunks_[index(chunk)].in_slot = true;
  slot_bytes_ += capacity(chunk);
  may_leave(chunk);
}

void Residency::give_up_slot(ChunkId chunk) noexcept {
  Chunk& entry = chunks_[index(chunk)];
  assert(entry.in_slot && entry.pins == 0);
  evictable_.remove(chunk);
  slot_bytes_ -= capacity(chunk);
  held_bytes_ -= entry.kept ? capacity(chunk) : 0;
  entry.in_slot = entry.kept = false;
}

Pin Residency::pin(ChunkId chunk) {
  Chunk& entry = chunks_[index(chunk)];
  assert(resident(chunk));
  if (entry.pins++ == 0 && entry.in_slot) {
    evictable_.remove(chunk);
    pinned_bytes_ += capacity(chunk);
    held_bytes_ += entry.kept ? 0 : capacity(chunk);
    entry.kept = entry.placement == Placement::kKeep;
  }
  return Pin(*this, chunk);
}

void Residency::unpin(ChunkId chunk) noexcept {
  Chunk& entry = chunks_[index(chunk)];
  assert(entry.pins > 0);
  if (--entry.pins == 0 && entry.in_slot) {
    pinned_bytes_ -= capacity(chunk);
    held_bytes_ -= entry.kept ? 0 : capacity(chunk);
    may_leave(chunk);
  }
}

void Residency::promote(ChunkId chunk) {
  assert(placement(chunk) == Placement::kStream && !in_slot(chunk));
  chunks_[index(chunk)].placement = Placement::kDevice;
}

void Residency::demote(ChunkId chunk) {
  Chunk& entry = chunks_[index(chunk)];
  assert(entry.placement == Placement::kDevice);
  entry.placement = Placement::kStream;
  entry.in_slot = true;
  slot_bytes_ += capacity(chunk);
  if (entry.pins > 0) {
    pinned_bytes_ += capacity(chunk);
    held_bytes_ += capacity(chunk);
  } else {
    may_leave(chunk);
  }
}

bool Residency::could_fit(std::size_t more_bytes, std::size_t cap_bytes, std::uint64_t now,
                          std::uint64_t horizon) {
  std::vector<ChunkId> victims;
  std::size_t left = slot_bytes_;
  while (left + more_bytes > cap_bytes) {
    const auto victim = evictable_.victim_from(now, horizon);
    if (!victim) {
      break;
    }
    evictable_.remove(*victim);
    victims.push_back(*victim);
    left -= capacity(*victim);
  }
  for (const ChunkId victim : victims) {
    may_leave(victim);
  }
  return left + more_bytes <= cap_bytes;
}

}  // namespace castor
