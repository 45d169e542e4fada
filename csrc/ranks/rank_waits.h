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

/// A thread's long wait for other ranks.
struct LongWait {
  std::size_t rank = 0;
  std::size_t size = 0;
  std::string place;         ///< activity of its rank: "ends backward pass 2 of step 1"
  std::string awaited;       ///< "rank 1 (process 4711)"
  std::string last;          ///< the last place that all ranks had reached; "": unknown
  std::uint64_t thread = 0;  ///< its number in Python
};

/// Record of the waits of a process's threads for other ranks, so that the process can report a
/// wait while it lasts. A thread that waits does not know whether the others will come.
/// Thread-safe; its mutex is taken before a place's.
class RankWaits {
  struct Entry;

 public:
  /// Function that describes a wait. The thread that looks calls it, while the waiting thread
  /// waits. It returns nullopt for a wait that is not to be reported, yet.
  using Describe = std::function<std::optional<LongWait>()>;

  /// The wait of the thread that began it, for as long as this object lives.
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

  /// Returns the first wait that has lasted for `looks` calls of this function. Each wait is
  /// returned once, and none while another that was returned still lasts: threads of a rank wait
  /// for the same ranks. The unit is calls and not time, because no call passes while the process
  /// is stopped. Waits of the threads `served` do not count: their ranks wait while another one
  /// works for all.
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

/// Activity of a rank within a group, so that a report can say where the rank waits for the others.
/// Thread-safe.
class RankPlace {
 public:
  /// Makes the place of a rank whose waits nobody looks at.
  RankPlace() : RankPlace(std::make_shared<RankWaits>(), 0, 1) {}
  RankPlace(std::shared_ptr<RankWaits> waits, std::size_t rank, std::size_t size)
      : waits_(std::move(waits)), rank_(rank), size_(size) {}

  /// Sets the present place, like Collectives::set_place.
  void set(std::string place);
  /// Records that all ranks are, or have been, at the present place.
  void met();
  /// Begins a wait of this thread at the present place, which lasts while the result lives.
  /// `awaited` returns the names of the ranks that it waits for; another thread calls it meanwhile.
  [[nodiscard]] RankWaits::Wait wait(std::function<std::string()> awaited);

 private:
  const std::shared_ptr<RankWaits> waits_;
  const std::size_t rank_;
  const std::size_t size_;
  Mutex mutex_;
  std::shared_ptr<const std::string> now_ CASTOR_GUARDED_BY(mutex_);
  std::shared_ptr<const std::string> last_ CASTOR_GUARDED_BY(mutex_);
};

/// Place and timeout with which a rank waits for the others of a group.
struct RankPatience {
  std::shared_ptr<RankPlace> place = std::make_shared<RankPlace>();
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

}  // namespace castor
