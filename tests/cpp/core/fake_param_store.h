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
#include "core/param_store.h"

namespace castor::testing {

/// An adversary did what it was asked to.
class InjectedFailure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Storage on a disk that is a vector of bytes. Adversary: a chunk comes to another place in memory
/// every time, is garbage until somebody has waited for it, and garbage again, and freed, once
/// nobody holds it; what was changed without saying so is an error. Thread-safe.
class FakeParamStore final : public ParamStore {
 public:
  FakeParamStore(const ChunkLayout& layout, std::vector<bool> stored)
      : stored_(std::move(stored)), chunks_(stored_.size()) {
    for (std::size_t i = 0; i < stored_.size(); ++i) {
      chunks_[i].disk.resize(stored_[i] ? layout.chunks()[i].used_bytes : 0);
    }
  }
  ~FakeParamStore() override { EXPECT_EQ(num_leased(), 0U) << "a hold outlives the store"; }

  [[nodiscard]] bool stored(ChunkId chunk) const noexcept override { return stored_[index(chunk)]; }
  [[nodiscard]] std::unique_ptr<ParamLease> lease(ChunkId chunk) override {
    const std::lock_guard lock(mutex_);
    Chunk& params = chunks_[index(chunk)];
    EXPECT_TRUE(stored_[index(chunk)]);
    if (--leases_left_ == 0) {
      throw InjectedFailure("hold");
    }
    if (params.leases == 0 && num_leased() == capacity_) {
      throw OutOfMemory(TierKind::kHost, params.disk.size(), 0, params.disk.size(), "window");
    }
    if (params.leases++ == 0) {
      params.memory.assign(params.disk.size(), kGarbage);
      params.there = params.written = false;
    }
    return std::make_unique<Lease>(*this, params);
  }
  [[nodiscard]] std::size_t max_leases() const noexcept override { return max_leases_; }
  void announce(std::span<const ChunkId> chunks) override {
    announced_.assign(chunks.begin(), chunks.end());
    ++num_announced_;
  }
  void moved_out(ChunkId chunk) noexcept override {
    EXPECT_TRUE(stored_[index(chunk)]);
    ++chunks_[index(chunk)].num_moved_out;
  }

  void set_max_leases(std::size_t max_leases) { max_leases_ = max_leases; }
  /// Chunks that can be in memory at the same time, from now on.
  void set_capacity(std::size_t capacity) { capacity_ = capacity; }
  /// The n-th hold is refused, or the n-th wait fails, from now on; counted from 1.
  void fail_lease(std::size_t call) { leases_left_ = call; }
  void fail_wait(std::size_t call) { waits_left_ = call; }
  void never_fail() { leases_left_ = waits_left_ = kNeverFails; }

  [[nodiscard]] const std::byte* disk(ChunkId chunk) const {
    return chunks_[index(chunk)].disk.data();
  }
  [[nodiscard]] std::size_t num_leases(ChunkId chunk) const { return chunks_[index(chunk)].leases; }
  [[nodiscard]] std::size_t num_leased() const {
    return static_cast<std::size_t>(std::count_if(
        chunks_.begin(), chunks_.end(), [](const Chunk& params) { return params.leases > 0; }));
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
    std::size_t leases = 0;
    bool there = false;
    bool written = false;
    std::size_t num_moved_out = 0;
  };
  class Lease final : public ParamLease {
   public:
    Lease(FakeParamStore& store, Chunk& params) : store_(store), params_(params) {}
    ~Lease() override { store_.release(params_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    [[nodiscard]] std::byte* data() const noexcept override { return params_.memory.data(); }
    void wait(ParamAccess access) override { store_.wait(params_, access); }

   private:
    FakeParamStore& store_;
    Chunk& params_;
  };

  void wait(Chunk& params, ParamAccess access) {
    const std::lock_guard lock(mutex_);
    if (--waits_left_ == 0) {
      throw InjectedFailure("wait for a chunk");
    }
    if (!std::exchange(params.there, true)) {
      params.memory = params.disk;
    }
    params.written = params.written || access == ParamAccess::kWrite;
  }
  void release(Chunk& params) {
    const std::lock_guard lock(mutex_);
    if (--params.leases > 0) {
      return;
    }
    if (params.written) {
      params.disk = params.memory;
    } else if (params.there) {
      EXPECT_EQ(params.memory, params.disk) << "a change that never reaches the disk";
    }
    std::fill(params.memory.begin(), params.memory.end(), kGarbage);
    params.memory = {};
  }

  const std::vector<bool> stored_;
  std::mutex mutex_;  // guards chunks_
  std::vector<Chunk> chunks_;
  std::vector<ChunkId> announced_;
  std::size_t num_announced_ = 0;
  std::size_t max_leases_ = 2;
  std::size_t capacity_ = kNeverFails;
  std::size_t leases_left_ = kNeverFails;
  std::size_t waits_left_ = kNeverFails;
};

}  // namespace castor::testing
