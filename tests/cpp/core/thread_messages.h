#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rank_messages.h"

namespace castor {

/// What the ranks of a test send each other: threads of one process, each with a RankMessages of
/// its own (of_rank). A rank that is killed sends nothing more, and who waits for it is told.
class ThreadMessages {
 public:
  explicit ThreadMessages(std::size_t size)
      : killed_(size, false), stopped_(size, false), deaf_(size, false) {}

  [[nodiscard]] std::shared_ptr<RankMessages> of_rank(std::size_t rank) {
    return std::make_shared<Rank>(*this, rank);
  }
  void kill(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    killed_[rank] = true;
    changed_.notify_all();
  }
  /// The rank's receive_any fails from now on.
  void deafen(std::size_t rank) {
    const std::lock_guard lock(mutex_);
    deaf_[rank] = true;
    changed_.notify_all();
  }

 private:
  struct Letter {
    std::size_t from = 0;
    std::size_t to = 0;
    std::uint32_t tag = 0;
    std::vector<std::byte> bytes;
  };

  class Sent final : public RankMessage {
   public:
    void wait() override {}
    void stop() noexcept override {}
  };

  class Expected final : public RankMessage {
   public:
    Expected(ThreadMessages& all, std::size_t from, std::size_t to, std::uint32_t tag,
             std::span<std::byte> bytes)
        : all_(all), from_(from), to_(to), tag_(tag), bytes_(bytes) {}

    void wait() override {
      std::unique_lock lock(all_.mutex_);
      all_.changed_.wait(lock, [&] { return stopped_ || all_.killed_[from_] || take(); });
      if (!taken_) {
        throw Error(stopped_ ? "it has let go of the model" : "it has ended");
      }
    }
    void stop() noexcept override {
      const std::lock_guard lock(all_.mutex_);
      stopped_ = true;
      all_.changed_.notify_all();
    }

   private:
    bool take() {
      const auto letter = std::ranges::find_if(all_.letters_, [&](const Letter& one) {
        return one.from == from_ && one.to == to_ && one.tag == tag_;
      });
      if (letter == all_.letters_.end()) {
        return false;
      }
      std::ranges::copy(letter->bytes, bytes_.begin());
      all_.letters_.erase(letter);
      return taken_ = true;
    }

    ThreadMessages& all_;
    const std::size_t from_;
    const std::size_t to_;
    const std::uint32_t tag_;
    const std::span<std::byte> bytes_;
    bool stopped_ = false;
    bool taken_ = false;
  };

  class Rank final : public RankMessages {
   public:
    Rank(ThreadMessages& all, std::size_t rank) : all_(all), rank_(rank) {}

    [[nodiscard]] std::size_t rank() const noexcept override { return rank_; }
    [[nodiscard]] std::size_t size() const noexcept override { return all_.killed_.size(); }
    [[nodiscard]] std::unique_ptr<RankMessage> send(std::size_t to, std::uint32_t tag,
                                                    std::span<const std::byte> bytes) override {
      const std::lock_guard lock(all_.mutex_);
      if (all_.killed_[to]) {
        throw Error("it has ended");
      }
      if (!all_.killed_[rank_]) {
        all_.letters_.push_back({rank_, to, tag, {bytes.begin(), bytes.end()}});
        all_.changed_.notify_all();
      }
      return std::make_unique<Sent>();
    }
    [[nodiscard]] std::unique_ptr<RankMessage> receive(std::size_t from, std::uint32_t tag,
                                                       std::span<std::byte> bytes) override {
      return std::make_unique<Expected>(all_, from, rank_, tag, bytes);
    }
    [[nodiscard]] std::optional<std::size_t> receive_any(std::uint32_t tag,
                                                         std::span<std::byte> bytes) override {
      std::unique_lock lock(all_.mutex_);
      auto letter = all_.letters_.end();
      all_.changed_.wait(lock, [&] {
        letter = std::ranges::find_if(
            all_.letters_, [&](const Letter& one) { return one.to == rank_ && one.tag == tag; });
        return all_.stopped_[rank_] || all_.deaf_[rank_] || letter != all_.letters_.end();
      });
      if (all_.deaf_[rank_]) {
        throw Error("another rank has ended");
      }
      if (all_.stopped_[rank_]) {
        return std::nullopt;
      }
      const std::size_t from = letter->from;
      std::ranges::copy(letter->bytes, bytes.begin());
      all_.letters_.erase(letter);
      return from;
    }
    void stop() noexcept override {
      const std::lock_guard lock(all_.mutex_);
      all_.stopped_[rank_] = true;
      all_.changed_.notify_all();
    }

   private:
    ThreadMessages& all_;
    const std::size_t rank_;
  };

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::list<Letter> letters_;
  std::vector<bool> killed_;
  std::vector<bool> stopped_;
  std::vector<bool> deaf_;
};

}  // namespace castor
