#include "c10d/group_collectives.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "c10d/group_backend.h"
#include "core/error.h"

namespace castor {
namespace {

constexpr std::uint32_t kTag = (1U << 30) + 1;  // no other message has it
/// Up to this size a rank sends what it has to all at once; more goes around in a ring, in which
/// each byte crosses each link once.
constexpr std::size_t kSentToAll = std::size_t{64} << 10;

}  // namespace

GroupCollectives::GroupCollectives(const std::string& group, std::shared_ptr<RankWaits> waits)
    : backend_(host_backend(group)),
      place_(std::make_shared<RankPlace>(std::move(waits), rank(), size(), numbers_of(*backend_))),
      messages_(group, place_) {}

RankPatience GroupCollectives::patience() const {
  return {.place = place_, .timeout = timeout_of(*backend_)};
}

std::size_t GroupCollectives::rank() const noexcept {
  return static_cast<std::size_t>(backend_->getRank());
}

std::size_t GroupCollectives::size() const noexcept {
  return static_cast<std::size_t>(backend_->getSize());
}

std::string GroupCollectives::description() const { return backend_->getBackendName(); }

GroupCollectives::Message GroupCollectives::send(std::size_t to, std::span<const std::byte> bytes) {
  return messages_.send(to, kTag, bytes);
}

GroupCollectives::Message GroupCollectives::receive(std::size_t from, std::span<std::byte> bytes) {
  return messages_.receive(from, kTag, bytes);
}

void GroupCollectives::wait_all(std::vector<Message> messages) {
  for (const Message& message : messages) {
    message->wait();
  }
  keep(std::move(messages));
}

void GroupCollectives::all_gather(std::span<const std::byte> own, std::span<std::byte> all) {
  const std::size_t bytes = own.size();
  const std::size_t ranks = size();
  const auto shard = [&](std::size_t rank) { return all.subspan(rank * bytes, bytes); };
  const auto copy_own = [&] {
    if (shard(rank()).data() != own.data()) {
      std::ranges::copy(own, shard(rank()).begin());
    }
  };
  complete([&] {
    std::vector<Message> messages;
    if (bytes <= kSentToAll || ranks == 1) {
      for (std::size_t step = 1; step < ranks && bytes > 0; ++step) {
        const std::size_t from = (rank() + ranks - step) % ranks;
        messages.push_back(receive(from, shard(from)));
        messages.push_back(send((rank() + step) % ranks, own));
      }
      copy_own();
      wait_all(std::move(messages));
      return;
    }
    const std::size_t next = (rank() + 1) % ranks;
    const std::size_t previous = (rank() + ranks - 1) % ranks;
    for (std::size_t step = 1; step < ranks; ++step) {
      messages.push_back(receive(previous, shard((rank() + ranks - step) % ranks)));
    }
    std::span<const std::byte> passed_on = own;
    for (std::size_t step = 1; step < ranks; ++step) {
      messages.push_back(send(next, passed_on));
      if (step == 1) {
        copy_own();
      }
      messages[step - 1]->wait();
      messages.back()->wait();
      passed_on = shard((rank() + ranks - step) % ranks);
    }
    keep(std::move(messages));
  });
}

void GroupCollectives::all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) {
  const std::size_t ranks = size();
  const std::size_t bytes = sent.size() / ranks;
  complete([&] {
    std::vector<Message> messages;
    for (std::size_t step = 1; step < ranks && bytes > 0; ++step) {
      const std::size_t from = (rank() + ranks - step) % ranks;
      const std::size_t to = (rank() + step) % ranks;
      messages.push_back(receive(from, received.subspan(from * bytes, bytes)));
      messages.push_back(send(to, sent.subspan(to * bytes, bytes)));
    }
    std::ranges::copy(sent.subspan(rank() * bytes, bytes),
                      received.subspan(rank() * bytes, bytes).begin());
    wait_all(std::move(messages));
  });
}

void GroupCollectives::ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) {
  const std::size_t ranks = size();
  complete([&] {
    if (ranks == 1) {
      std::ranges::copy(sent, received.begin());
      return;
    }
    std::vector<Message> messages;
    messages.push_back(receive((rank() + ranks - 1) % ranks, received));
    messages.push_back(send((rank() + 1) % ranks, sent));
    wait_all(std::move(messages));
  });
}

// A binomial tree: who has the values passes them on to ranks that are farther away each time.
void GroupCollectives::broadcast(std::span<std::byte> values) {
  complete([&] {
    std::size_t distance = 1;
    while (distance < size() && (rank() & distance) == 0) {
      distance <<= 1;
    }
    std::vector<Message> messages;
    if (rank() != 0) {
      messages.push_back(receive(rank() - distance, values));
      messages.back()->wait();
    }
    for (distance >>= 1; distance > 0; distance >>= 1) {
      if (rank() + distance < size()) {
        messages.push_back(send(rank() + distance, values));
        messages.back()->wait();
      }
    }
    keep(std::move(messages));
  });
}

template <typename Call>
void GroupCollectives::complete(const Call& call) {
  try {
    if (left_) {
      throw Error("it has let go of the model itself");
    }
    call();
    place_->met();
  } catch (const std::exception& error) {
    throw lost_ranks(*this, without_places(error));
  }
}

}  // namespace castor
