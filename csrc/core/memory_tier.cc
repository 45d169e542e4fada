#include "core/memory_tier.h"

#include <cassert>
#include <utility>

namespace castor {

Block::Block(Arena& arena, Reservation reservation, const ComputeStream* stream)
    : arena_(&arena),
      stream_(stream),
      data_(reservation.bytes() == 0 ? nullptr
            : stream == nullptr      ? arena.allocate(reservation.bytes())
                                     : arena.allocate_on(reservation.bytes(), stream->id())),
      reservation_(std::move(reservation)) {}

Block::Block(Block&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      stream_(other.stream_),
      data_(std::exchange(other.data_, nullptr)),
      reservation_(std::move(other.reservation_)) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    reset();
    arena_ = std::exchange(other.arena_, nullptr);
    stream_ = other.stream_;
    data_ = std::exchange(other.data_, nullptr);
    reservation_ = std::move(other.reservation_);
  }
  return *this;
}

void Block::pay_with(Reservation reservation) noexcept {
  assert(reservation.bytes() == bytes());
  reservation_ = std::move(reservation);
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

void Block::add_user(StreamId stream) const {
  if (data_ != nullptr) {
    arena_->add_user(data_, stream);
  }
}

void Block::await_users() const {
  if (data_ != nullptr && stream_ != nullptr) {
    arena_->await_users(data_, stream_->id());
  }
}

void Block::reset() noexcept {
  if (data_ != nullptr) {
    Arena& arena = *std::exchange(arena_, nullptr);
    std::byte* const data = std::exchange(data_, nullptr);
    if (stream_ == nullptr) {
      arena.deallocate(data, reservation_.bytes());
    } else {
      arena.deallocate_behind(data, reservation_.bytes(), stream_->id());
    }
  }
  reservation_.release();
}

}  // namespace castor
