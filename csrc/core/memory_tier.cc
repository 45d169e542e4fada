#include "core/memory_tier.h"

#include <utility>

namespace castor {

Block::Block(Arena& arena, Reservation reservation)
    : arena_(&arena),
      data_(reservation.bytes() == 0 ? nullptr : arena.allocate(reservation.bytes())),
      reservation_(std::move(reservation)) {}

Block::Block(Block&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      reservation_(std::move(other.reservation_)) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    reset();
    arena_ = std::exchange(other.arena_, nullptr);
    data_ = std::exchange(other.data_, nullptr);
    reservation_ = std::move(other.reservation_);
  }
  return *this;
}

void Block::discard() noexcept {
  if (data_ != nullptr) {
    arena_->discard(data_, reservation_.bytes());
  }
}

void Block::share_with_children() noexcept {
  if (data_ != nullptr) {
    arena_->share_with_children(data_, reservation_.bytes());
  }
}

void Block::reset() noexcept {
  if (data_ != nullptr) {
    std::exchange(arena_, nullptr)->deallocate(std::exchange(data_, nullptr), reservation_.bytes());
  }
  reservation_.release();
}

}  // namespace castor
