#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/chunk_layout.h"
#include "core/error.h"
#include "core/home_store.h"

namespace castor::testing {

/// An adversary did what it was asked to.
class InjectedFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Homes on a disk that is a vector of bytes. Adversary: a home comes to another place in memory
/// every time, is garbage until somebody has waited for it, and garbage again, and freed, once
/// nobody holds it; what was changed without saying so is an error. Thread-safe.
class FakeHomes final : public HomeStore {
 public:
  FakeHomes(const ChunkLayout& layout, std::vector<bool> stored)
      : stored_(std::move(stored)), chunks_(stored_.size()) {
    for (std::size_t i = 0; i < stored_.size(); ++i) {
      chunks_[i].disk.resize(stored_[i] ? layout.chunks()[i].used_bytes : 0);
    }
  }
  ~FakeHomes() override { EXPECT_EQ(num_held(), 0U) << "a hold outlives the store"; }

  [[nodiscard]] bool stored(ChunkId chunk) const noexcept override { return stored_[index(chunk)]; }
  [[nodiscard]] std::unique_ptr<HomeHold> hold(ChunkId chunk) override {
    const std::lock_guard lock(mutex_);
    Chunk& home = chunks_[index(chunk)];
    EXPECT_TRUE(stored_[index(chunk)]);
    if (--holds_left_ == 0) {
      throw InjectedFailure("hold");
    }
    if (home.holds == 0 && num_held() == capacity_) {
      throw OutOfMemory(TierKind::kHost, home.disk.size(), 0, home.disk.size(), "window");
    }
    if (home.holds++ == 0) {
      home.memory.assign(home.disk.size(), kGarbage);
      home.there = home.written = false;
    }
    return std::make_unique<Hold>(*this, home);
  }
  [[nodiscard]] std::size_t max_held() const noexcept override { return max_held_; }
  void announce(std::span<const ChunkId> chunks) override {
    announced_.assign(chunks.begin(), chunks.end());
    ++num_announced_;
  }
  void moved_out(ChunkId chunk) noexcept override {
    EXPECT_TRUE(stored_[index(chunk)]);
    ++chunks_[index(chunk)].num_moved_out;
  }

  void set_max_held(std::size_t max_held) { max_held_ = max_held; }
  /// Homes that can be in memory at the same time, from now on.
  void set_capacity(std::size_t capacity) { capacity_ = capacity; }
  /// The n-th hold is refused, or the n-th wait fails, from now on; counted from 1.
  void fail_hold(std::size_t call) { holds_left_ = call; }
  void fail_wait(std::size_t call) { waits_left_ = call; }
  void never_fail() { holds_left_ = waits_left_ = kNeverFails; }

  [[nodiscard]] const std::byte* disk(ChunkId chunk) const {
    return chunks_[index(chunk)].disk.data();
  }
  [[nodiscard]] std::size_t num_holds(ChunkId chunk) const { return chunks_[index(chunk)].holds; }
  [[nodiscard]] std::size_t num_held() const {
    return static_cast<std::size_t>(std::count_if(
        chunks_.begin(), chunks_.end(), [](const Chunk& home) { return home.holds > 0; }));
  }
  [[nodiscard]] std::size_t num_moved_out(ChunkId chunk) const {
    return chunks_[index(chunk)].num_moved_out;
  }
  /// By the last call.
  [[nodiscard]] const std::vector<ChunkId>& announced() const { return announced_; }
  [[nodiscard]] std::size_t num_announced() const { return num_announced_; }

 private:
  static constexpr std::byte kGarbage{0xA5};
  static constexpr std::size_t kNeverFails = std::numeric_limits<std::size_t>::max();

  struct Chunk {
    std::vector<std::byte> disk;
    std::vector<std::byte> memory;
    std::size_t holds = 0;
    bool there = false;
    bool written = false;
    std::size_t num_moved_out = 0;
  };
  class Hold final : public HomeHold {
   public:
    Hold(FakeHomes& homes, Chunk& home) : homes_(homes), home_(home) {}
    ~Hold() override { homes_.release(home_); }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    [[nodiscard]] std::byte* data() const noexcept override { return home_.memory.data(); }
    void wait(HomeAccess access) override { homes_.wait(home_, access); }

   private:
    FakeHomes& homes_;
    Chunk& home_;
  };

  void wait(Chunk& home, HomeAccess access) {
    const std::lock_guard lock(mutex_);
    if (--waits_left_ == 0) {
      throw InjectedFailure("wait for a home");
    }
    if (!std::exchange(home.there, true)) {
      home.memory = home.disk;
    }
    home.written = home.written || access == HomeAccess::kWrite;
  }
  void release(Chunk& home) {
    const std::lock_guard lock(mutex_);
    if (--home.holds > 0) {
      return;
    }
    if (home.written) {
      home.disk = home.memory;
    } else if (home.there) {
      EXPECT_EQ(home.memory, home.disk) << "a change that never reaches the disk";
    }
    std::fill(home.memory.begin(), home.memory.end(), kGarbage);
    home.memory = {};
  }

  const std::vector<bool> stored_;
  std::mutex mutex_;  // guards chunks_
  std::vector<Chunk> chunks_;
  std::vector<ChunkId> announced_;
  std::size_t num_announced_ = 0;
  std::size_t max_held_ = 2;
  std::size_t capacity_ = kNeverFails;
  std::size_t holds_left_ = kNeverFails;
  std::size_t waits_left_ = kNeverFails;
};

}  // namespace castor::testing
