#include "core/residency.h"

#include <cassert>
#include <string>

#include "core/error.h"

namespace castor {

Residency::Residency(const ChunkLayout& layout, std::span<const Placement> placements)
    : chunks_(layout.chunks().size()) {
  if (placements.size() != chunks_.size()) {
    throw InvalidArgument("there are " + std::to_string(chunks_.size()) + " chunks but " +
                          std::to_string(placements.size()) + " placements");
  }
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    chunks_[i].capacity_bytes = layout.chunks()[i].capacity_bytes;
    chunks_[i].placement = placements[i];
  }
}

void Residency::set_next_use(ChunkId chunk, std::uint64_t next_use) {
  if (may_leave(chunk) && next_use != at(chunk).next_use) {
    auto node = evictable_.extract(key_of(chunk));
    node.value().first = next_use;
    evictable_.insert(std::move(node));
  }
  chunks_[index(chunk)].next_use = next_use;
}

void Residency::take_slot(ChunkId chunk) {
  assert(!resident(chunk));
  chunks_[index(chunk)].in_slot = true;
  slot_bytes_ += capacity(chunk);
  if (may_leave(chunk)) {
    evictable_.insert(key_of(chunk));
  }
}

void Residency::give_up_slot(ChunkId chunk) noexcept {
  Chunk& entry = chunks_[index(chunk)];
  assert(entry.in_slot && entry.pins == 0);
  evictable_.erase(key_of(chunk));
  slot_bytes_ -= capacity(chunk);
  held_bytes_ -= entry.kept ? capacity(chunk) : 0;
  entry.in_slot = entry.kept = false;
}

Pin Residency::pin(ChunkId chunk, PinKind kind) {
  Chunk& entry = chunks_[index(chunk)];
  assert(resident(chunk));
  if (entry.pins == 0 && entry.in_slot) {
    evictable_.erase(key_of(chunk));
    pinned_bytes_ += capacity(chunk);
    held_bytes_ += entry.kept ? 0 : capacity(chunk);
    entry.kept = entry.placement == Placement::kKeep;
  }
  ++entry.pins;
  if (kind == PinKind::kOperator) {
    ++entry.operator_pins;
    ++num_operator_pins_;
  }
  return Pin(*this, chunk, kind);
}

void Residency::unpin(ChunkId chunk, PinKind kind) noexcept {
  Chunk& entry = chunks_[index(chunk)];
  assert(entry.pins > 0);
  if (kind == PinKind::kOperator) {
    assert(entry.operator_pins > 0);
    --entry.operator_pins;
    --num_operator_pins_;
  }
  if (--entry.pins == 0 && entry.in_slot) {
    pinned_bytes_ -= capacity(chunk);
    held_bytes_ -= entry.kept ? 0 : capacity(chunk);
    if (may_leave(chunk)) {
      evictable_.insert(key_of(chunk));
    }
  }
}

void Residency::promote(ChunkId chunk) {
  assert(placement(chunk) == Placement::kStream && !in_slot(chunk));
  chunks_[index(chunk)].placement = Placement::kDevice;
  chunks_[index(chunk)].promoted = true;
}

void Residency::demote(ChunkId chunk) {
  assert(promoted(chunk));
  chunks_[index(chunk)].placement = Placement::kStream;
  chunks_[index(chunk)].promoted = false;
  take_slot(chunk);
  if (pins(chunk) > 0) {
    pinned_bytes_ += capacity(chunk);
    held_bytes_ += capacity(chunk);
  }
}

bool Residency::could_fit(std::size_t more_bytes, std::size_t cap_bytes,
                          std::uint64_t horizon) const {
  std::size_t left = slot_bytes_;
  for (auto key = evictable_.rbegin(); left + more_bytes > cap_bytes; ++key) {
    if (key == evictable_.rend() || key->first < horizon) {
      return false;
    }
    left -= capacity(chunk_of(*key));
  }
  return true;
}

}  // namespace castor
