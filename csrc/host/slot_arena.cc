#include "host/slot_arena.h"

#include <cassert>
#include <utility>

#include "core/error.h"
#include "core/units.h"

namespace castor {

SlotArena::SlotArena(std::unique_ptr<Arena> upstream, TierKind tier)
    : upstream_(std::move(upstream)), tier_(tier) {}

SlotArena::~SlotArena() {
  trim(0, 0);
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
                          format_bytes(free_bytes()) +
                          ", which go when chunks of other sizes are fetched");
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

std::byte* SlotArena::take_excess(std::size_t keep, std::size_t next, std::size_t& bytes) noexcept {
  const MutexLock lock(mutex_);
  std::size_t total = 0;
  auto largest = slots_.end();
  for (auto entry = slots_.begin(); entry != slots_.end(); ++entry) {
    const std::size_t served = entry->first == next ? 1 : 0;
    if (entry->second.free.size() > served) {
      total += entry->first * (entry->second.free.size() - served);
      largest = entry;
    }
  }
  if (total <= keep) {
    return nullptr;
  }
  bytes = largest->first;
  Slots& slots = largest->second;
  std::byte* const data = slots.free.front();  // freed before the others
  slots.free.erase(slots.free.begin());
  --slots.num_blocks;
  return data;
}

void SlotArena::trim(std::size_t keep, std::size_t next) noexcept {
  std::size_t bytes = 0;
  while (std::byte* const data = take_excess(keep, next, bytes)) {
    upstream_->deallocate(data, bytes);
  }
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
