#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/mutex.h"

namespace castor {

/// Of a thread that has waited long for other ranks.
struct LongWait {
  std::size_t rank = 0;
  std::size_t size = 0;
  std::string place;         ///< what its rank does: "ends backward pass 2 of step 1"
  std::string awaited;       ///< "rank 1 (process 4711)"
  std::string last;          ///< the place where all were last; "": that is not known
  std::uint64_t thread = 0;  ///< as Python numbers it
};

/// Where the threads of a process wait for other ranks, so that it can say so while they do: nobody
/// who waits knows whether the others will come. Thread-safe; its mutex is taken before a place's.
class RankWaits {
  struct Entry;

 public:
  /// Called while the thread waits, from the one that looks. nullopt: not to be told of, yet.
  using Describe = std::function<std::optional<LongWait>()>;

  /// The thread that has begun it waits while this lives.
  class Wait {
   public:
    Wait(RankWaits& waits, std::list<Entry>::iterator entry) : waits_(&waits), entry_(entry) {}
    ~Wait();
    Wait(Wait&& other) noexcept
        : waits_(std::exchange(other.waits_, nullptr)), entry_(other.entry_) {}
    Wait& operator=(Wait&&) = delete;

   private:
    RankWaits* waits_;
    const std::list<Entry>::iterator entry_;
  };

  [[nodiscard]] Wait begin(Describe describe);

  /// Of those that have lasted for `looks` of these calls the first, each once, and none beside one
  /// that has been told of: threads of a rank wait for the same. Calls, not time: while the process
  /// is stopped none passes. `served`: threads whose ranks wait while another works for all.
  [[nodiscard]] std::optional<LongWait> look(int looks, std::span<const std::uint64_t> served = {});

 private:
  struct Entry {
    Describe describe;
    std::uint64_t thread = 0;
    int looks = 0;
    bool told = false;
  };

  Mutex mutex_;
  std::list<Entry> entries_ CASTOR_GUARDED_BY(mutex_);
};

/// What a rank does with the others of a group, to tell of where it waits for them. Thread-safe.
class RankPlace {
 public:
  /// Of one that nobody looks at.
  RankPlace() : RankPlace(std::make_shared<RankWaits>(), 0, 1) {}
  RankPlace(std::shared_ptr<RankWaits> waits, std::size_t rank, std::size_t size)
      : waits_(std::move(waits)), rank_(rank), size_(size) {}

  /// As Collectives::set_place.
  void set(std::string place);
  /// All ranks are here, or have been.
  void met();
  /// This thread waits there for those that `awaited` names, which is called meanwhile from
  /// another, while the result lives.
  [[nodiscard]] RankWaits::Wait wait(std::function<std::string()> awaited);

 private:
  const std::shared_ptr<RankWaits> waits_;
  const std::size_t rank_;
  const std::size_t size_;
  Mutex mutex_;
  std::shared_ptr<const std::string> now_ CASTOR_GUARDED_BY(mutex_);
  std::shared_ptr<const std::string> last_ CASTOR_GUARDED_BY(mutex_);
};

/// How a rank waits for the others of a group.
struct RankPatience {
  std::shared_ptr<RankPlace> place = std::make_shared<RankPlace>();
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

}  // namespace castor
