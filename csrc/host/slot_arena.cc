#include "host/slot_arena.h"

#include <cassert>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {

SlotArena::SlotArena(std::unique_ptr<Arena> upstream, TierKind tier)
    : upstream_(std::move(upstream)), tier_(tier) {}

SlotArena::~SlotArena() {
  trim();
#ifndef NDEBUG
  for (const auto& [bytes, slots] : slots_) {
    assert(slots.num_blocks == 0 && "a block outlived its arena");
  }
#endif
}

std::byte* SlotArena::allocate(std::size_t bytes) {
  {
    const MutexLock lock(mutex_);
    Slots& slots = slots_[bytes];
    if (!slots.free.empty()) {
      std::byte* const data = slots.free.back();
      slots.free.pop_back();
      return data;
    }
    if (slots.free.capacity() == slots.num_blocks) {
      slots.free.reserve(2 * slots.num_blocks + 1);
    }
    ++slots.num_blocks;  // its place in the list is taken before the memory is
  }
  try {
    return new_block(bytes);
  } catch (...) {
    const MutexLock lock(mutex_);
    --slots_.find(bytes)->second.num_blocks;
    throw;
  }
}

std::byte* SlotArena::new_block(std::size_t bytes) {
  try {
    return upstream_->allocate(bytes);
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(tier_, error.requested(), error.available(), error.budget(),
                      std::string(error.what()) + ". Free slots of other sizes hold " +
                          format_bytes(free_bytes()) + ", which trim() gives back");
  }
}

void SlotArena::deallocate(std::byte* data, std::size_t bytes) noexcept {
  const MutexLock lock(mutex_);
  const auto found = slots_.find(bytes);
  assert(found != slots_.end() && "the size of a block changed between allocate and deallocate");
  Slots& slots = found->second;
  assert(slots.free.size() < slots.num_blocks && "more blocks given back than taken");
  slots.free.push_back(data);
}

std::size_t SlotArena::trim() noexcept {
  std::size_t trimmed = 0;
  MutexLock lock(mutex_);
  for (auto& [bytes, slots] : slots_) {
    while (!slots.free.empty()) {
      std::byte* const data = slots.free.back();
      slots.free.pop_back();
      --slots.num_blocks;
      lock.unlock();  // entries of slots_ are never erased: the iteration survives
      upstream_->deallocate(data, bytes);
      trimmed += bytes;
      lock.lock();
    }
  }
  return trimmed;
}

std::size_t SlotArena::free_bytes() const {
  const MutexLock lock(mutex_);
  std::size_t total = 0;
  for (const auto& [bytes, slots] : slots_) {
    total += bytes * slots.free.size();
  }
  return total;
}

std::string SlotArena::description() const {
  return "slot arena (" + format_bytes(free_bytes()) + " in free slots) over " +
         upstream_->description();
}

}  // namespace castor
