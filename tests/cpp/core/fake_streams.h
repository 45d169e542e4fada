#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/copy_engine.h"
#include "core/memory_tier.h"

// A device whose streams are queues: nothing runs before somebody lets it, and then in an order
// that a seed chooses. What is not ordered by an event happens in the worst order sooner or later.
namespace castor::testing {

/// Not thread-safe.
class FakeStreams {
 public:
  explicit FakeStreams(unsigned seed) : random_(seed) {}

  void enqueue(StreamId stream, std::function<void()> kernel) {
    queues_[stream].push_back({.run = std::move(kernel), .event = 0});
  }
  /// Stands for what `stream` has been given.
  [[nodiscard]] std::size_t record(StreamId stream) {
    const std::size_t event = ++last_event_;
    enqueue(stream, [this, event] { reached_.push_back(event); });
    return event;
  }
  void wait(StreamId stream, std::size_t event) {
    queues_[stream].push_back({.run = {}, .event = event});
  }
  void order(StreamId first, StreamId then) {
    if (first != then) {
      wait(then, record(first));
    }
  }
  [[nodiscard]] bool done(std::size_t event) const {
    return std::find(reached_.begin(), reached_.end(), event) != reached_.end();
  }
  /// Lets one of the streams that can go on do its next item; false if none can.
  bool step() {
    std::vector<Queue*> ready;
    for (auto& [stream, queue] : queues_) {
      if (!queue.empty() && (queue.front().event == 0 || done(queue.front().event))) {
        ready.push_back(&queue);
      }
    }
    if (ready.empty()) {
      return false;
    }
    Queue& queue = *ready[random_() % ready.size()];
    const Item item = std::move(queue.front());
    queue.pop_front();
    if (item.run) {
      item.run();
    }
    return true;
  }
  void run_until(std::size_t event) {
    while (!done(event)) {
      ASSERT_TRUE(step()) << "streams wait for each other";
    }
  }
  void run_all() {
    while (step()) {
    }
  }
  std::mt19937& random() { return random_; }

 private:
  struct Item {
    std::function<void()> run;
    std::size_t event = 0;  // to wait for; 0: none
  };
  using Queue = std::deque<Item>;

  std::map<StreamId, Queue> queues_;
  std::size_t last_event_ = 0;
  std::vector<std::size_t> reached_;
  std::mt19937 random_;
};

/// Torch's caching allocator: a pool of free blocks for each stream, reused at once by what the
/// stream is given next. Blocks of one size.
class PoolArena final : public Arena {
 public:
  PoolArena(FakeStreams& streams, std::size_t bytes) : streams_(streams), bytes_(bytes) {}

  std::byte* allocate(std::size_t) override {
    ADD_FAILURE() << "device memory was taken for no stream";
    return nullptr;
  }
  void deallocate(std::byte*, std::size_t) noexcept override {
    ADD_FAILURE() << "device memory was given back behind no stream";
  }
  std::byte* allocate_on(std::size_t bytes, StreamId stream) override {
    EXPECT_EQ(bytes, bytes_);
    auto& free = free_[stream];
    if (free.empty()) {
      memory_.push_back(std::make_unique<std::byte[]>(bytes_));
      free.push_back(memory_.back().get());
    }
    std::byte* const data = free.back();
    free.pop_back();
    blocks_[data] = {.pool = stream, .users = {}};
    return data;
  }
  void deallocate_behind(std::byte* data, std::size_t, StreamId stream) noexcept override {
    const Used block = std::move(blocks_[data]);
    blocks_.erase(data);
    streams_.order(stream, block.pool);
    for (const StreamId user : block.users) {
      streams_.order(user, block.pool);
    }
    free_[block.pool].push_back(data);
  }
  void await_users(const std::byte* data, StreamId stream) override {
    for (const StreamId user : std::exchange(blocks_[const_cast<std::byte*>(data)].users, {})) {
      streams_.order(user, stream);
    }
  }
  /// Tensor.record_stream.
  void record(std::byte* data, StreamId stream) { blocks_[data].users.push_back(stream); }
  std::string description() const override { return "pools"; }

 private:
  struct Used {
    StreamId pool{};
    std::vector<StreamId> users;
  };
  FakeStreams& streams_;
  const std::size_t bytes_;
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::map<StreamId, std::vector<std::byte*>> free_;
  std::map<std::byte*, Used> blocks_;
};

/// A GPU's copy engine: a stream for each direction.
class StreamedCopies final : public CopyEngine {
 public:
  explicit StreamedCopies(FakeStreams& streams) : streams_(streams) {}

  CopyTicket submit(const CopyRequest& request) override {
    const StreamId lane{request.direction == CopyDirection::kHostToDevice ? 1001u : 1002u};
    streams_.order(request.behind, lane);
    streams_.enqueue(lane, [source = request.source, target = request.target] {
      std::memcpy(target.data(), source.data(), source.size());
    });
    return CopyTicket{streams_.record(lane)};
  }
  void wait(CopyTicket ticket) override { streams_.run_until(static_cast<std::size_t>(ticket)); }
  void order(CopyTicket ticket, StreamId stream) override {
    streams_.wait(stream, static_cast<std::size_t>(ticket));
  }
  bool done(CopyTicket ticket) override { return streams_.done(static_cast<std::size_t>(ticket)); }
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }

 private:
  FakeStreams& streams_;
};

}  // namespace castor::testing
