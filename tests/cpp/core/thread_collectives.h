#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/collectives.h"
#include "core/error.h"
#include "core/mutex.h"

namespace castor {

/// The ranks of a test: threads of one process, each with a Collectives of its own. Every call is
/// delayed by a random time, up to `longest_delay`.
class ThreadRanks {
 public:
  static constexpr std::chrono::microseconds kLongestDelay{200};

  explicit ThreadRanks(std::size_t size, unsigned seed = 0,
                       std::chrono::microseconds longest_delay = kLongestDelay)
      : size_(size),
        seed_(seed),
        longest_delay_(longest_delay),
        sent_(size),
        present_(size),
        places_(size) {}

  /// Runs `work` on every rank. What a rank throws ends it alone: see failures().
  void run(const std::function<void(Collectives&)>& work) {
    failures_.assign(size_, "");
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < size_; ++rank) {
      threads.emplace_back([this, rank, &work] {
        Rank own(*this, rank);
        try {
          work(own);
        } catch (const Error& error) {
          failures_[rank] = error.what();
        }
        own.end();
      });
    }
  }
  /// What each rank threw in run(); "": nothing.
  [[nodiscard]] const std::vector<std::string>& failures() const noexcept { return failures_; }
  /// What each rank said last that it does.
  [[nodiscard]] const std::vector<std::string>& places() const noexcept { return places_; }

 private:
  class Rank final : public Collectives {
   public:
    Rank(ThreadRanks& ranks, std::size_t rank)
        : ranks_(ranks), rank_(rank), random_(ranks.seed_ + static_cast<unsigned>(rank)) {}

    [[nodiscard]] std::size_t rank() const noexcept override { return rank_; }
    [[nodiscard]] std::size_t size() const noexcept override { return ranks_.size_; }
    /// The ranks have other numbers in the run than in this group.
    [[nodiscard]] std::string name_of(std::size_t rank) const override {
      return "rank " + std::to_string(100 + rank);
    }

    [[nodiscard]] std::string description() const override { return "threads"; }
    [[nodiscard]] Collectives* node() noexcept override { return this; }

    void all_gather(std::span<const std::byte> own, std::span<std::byte> all) override {
      exchange(own, [&](std::size_t rank, std::span<const std::byte> theirs) {
        std::ranges::copy(theirs, all.begin() + static_cast<std::ptrdiff_t>(rank * theirs.size()));
      });
    }
    void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override {
      const std::size_t part = sent.size() / size();
      exchange(sent, [&](std::size_t rank, std::span<const std::byte> theirs) {
        std::ranges::copy(theirs.subspan(rank_ * part, part),
                          received.begin() + static_cast<std::ptrdiff_t>(rank * part));
      });
    }
    void ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) override {
      exchange(sent, [&](std::size_t rank, std::span<const std::byte> theirs) {
        if ((rank + 1) % size() == rank_) {
          std::ranges::copy(theirs, received.begin());
        }
      });
    }

    void set_place(std::string place) override { ranks_.places_[rank_] = std::move(place); }
    void leave() noexcept override {
      {
        const MutexLock lock(ranks_.mutex_);
        ranks_.left_ = true;
      }
      ranks_.met_.notify_all();
    }
    void end() noexcept {
      {
        const MutexLock lock(ranks_.mutex_);
        --ranks_.present_;
        ranks_.release_if_all_are_here();
      }
      ranks_.met_.notify_all();
    }

   private:
    void barrier() {
      MutexLock lock(ranks_.mutex_);
      const std::size_t number = ranks_.barriers_;
      ++ranks_.here_;
      ranks_.release_if_all_are_here();
      ranks_.met_.notify_all();
      ranks_.met_.wait(lock.native(), [&]() CASTOR_REQUIRES(ranks_.mutex_) {
        return ranks_.barriers_ != number || ranks_.left_;
      });
      if (ranks_.left_) {
        throw lost_ranks(*this, "one has let go");
      }
    }

    template <typename Take>
    void exchange(std::span<const std::byte> own, const Take& take) {
      if (const auto most = static_cast<unsigned>(ranks_.longest_delay_.count()); most > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
      }
      ranks_.sent_[rank_].assign(own.begin(), own.end());
      barrier();
      for (std::size_t rank = 0; rank < size(); ++rank) {
        take(rank, std::span<const std::byte>(ranks_.sent_[rank]));
      }
      barrier();
    }

    ThreadRanks& ranks_;
    const std::size_t rank_;
    std::minstd_rand random_;
  };

  void release_if_all_are_here() CASTOR_REQUIRES(mutex_) {
    if (here_ == present_) {
      here_ = 0;
      ++barriers_;
    }
  }

  const std::size_t size_;
  const unsigned seed_;
  const std::chrono::microseconds longest_delay_;
  std::vector<std::vector<std::byte>> sent_;
  Mutex mutex_;  // a rank may leave() in one thread while another of its threads waits
  std::condition_variable met_;
  std::size_t present_ CASTOR_GUARDED_BY(mutex_);
  std::size_t here_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::size_t barriers_ CASTOR_GUARDED_BY(mutex_) = 0;
  bool left_ CASTOR_GUARDED_BY(mutex_) = false;
  std::vector<std::string> failures_;
  std::vector<std::string> places_;
};

}  // namespace castor
