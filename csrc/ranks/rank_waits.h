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
#include "ranks/rank_health.h"

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
/// It knows the health of the other ranks, where they publish heartbeats. Thread-safe; its mutex is
/// taken before a place's.
class RankWaits {
  struct Entry;

 public:
  /// Function that describes a wait. The thread that looks calls it, while the waiting thread
  /// waits. It returns nullopt for a wait that is not to be reported, yet.
  using Describe = std::function<std::optional<LongWait>()>;
  /// Function that makes a wait end with an error, which says why. It throws nothing and calls
  /// nothing of this class. Called by begin() or by another thread.
  using Abort = std::function<void(const std::string& why)>;

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

  /// Begins a wait. `abort`: empty where the wait cannot be ended.
  [[nodiscard]] Wait begin(Describe describe, Abort abort = {});
  /// Says why a rank is lost, which ends the waits that can be ended, and those that begin later.
  /// Empty: no rank is lost any more, which counts only where no wait was ended. Messages have been
  /// given up then, and threads of this process may begin to wait when nobody looks, because it
  /// ends.
  void set_lost(const std::string& why);

  /// Sets what this process knows of the other ranks; nullptr: nothing. Where these are the ranks
  /// of another run than before, none is lost yet.
  void set_health(std::shared_ptr<RankHealth> health);
  [[nodiscard]] std::shared_ptr<RankHealth> health() const;

  /// Returns the first wait that has lasted for `looks` calls of this function. Each wait is
  /// returned once, and none while another that was returned still lasts: threads of a rank wait
  /// for the same ranks. The unit is calls and not time, because no call passes while the process
  /// is stopped. Waits of the threads `served` do not count: their ranks wait while another one
  /// works for all.
  [[nodiscard]] std::optional<LongWait> look(int looks, std::span<const std::uint64_t> served = {});

 private:
  struct Entry {
    Describe describe;
    Abort abort;
    std::uint64_t thread = 0;
    int looks = 0;
    bool told = false;
  };

  void end_if_lost(const Entry& entry) CASTOR_REQUIRES(mutex_);

  Mutex mutex_;
  std::list<Entry> entries_ CASTOR_GUARDED_BY(mutex_);
  std::string lost_ CASTOR_GUARDED_BY(mutex_);      // why waits end; empty: they do not
  bool aborted_ CASTOR_GUARDED_BY(mutex_) = false;  // a wait has been ended
  mutable Mutex health_mutex_;
  std::shared_ptr<RankHealth> health_ CASTOR_GUARDED_BY(health_mutex_);
};

/// Activity of a rank within a group, so that a report can say where the rank waits for the others.
/// Thread-safe.
class RankPlace {
 public:
  /// `numbers`: numbers of the group's ranks in the run; empty: 0, 1, 2, ...
  RankPlace(std::shared_ptr<RankWaits> waits, std::size_t rank, std::size_t size,
            std::vector<std::size_t> numbers = {})
      : waits_(std::move(waits)), rank_(rank), size_(size), numbers_(std::move(numbers)) {}

  /// Sets the present place, like Collectives::set_place.
  void set(std::string place);
  /// Records that all ranks are, or have been, at the present place.
  void met();
  /// Begins a wait of this thread at the present place, which lasts while the result lives.
  /// `awaited` returns the names of the ranks that it waits for; another thread calls it meanwhile.
  [[nodiscard]] RankWaits::Wait wait(std::function<std::string()> awaited,
                                     RankWaits::Abort abort = {});

  // Arguments are numbers in the group.
  /// Returns this rank's name, like Collectives::name.
  [[nodiscard]] std::string name() const;
  /// Returns the name of a rank of the group, by its number in the run: "rank 3".
  [[nodiscard]] std::string name_of(std::size_t rank) const;

  // Same as RankHealth. Where ranks publish no heartbeats, no rank is lost, and nothing is known of
  // one; explain() returns `error`.
  [[nodiscard]] LostRank find_lost() const;
  [[nodiscard]] std::string last_of(std::size_t rank) const;
  /// Also ends the waits of this process's other threads, where a rank is lost.
  [[nodiscard]] std::string explain(std::size_t rank, const std::string& error) const;

 private:
  [[nodiscard]] std::size_t number_of(std::size_t rank) const {
    return numbers_.empty() ? rank : numbers_[rank];
  }

  const std::shared_ptr<RankWaits> waits_;
  const std::size_t rank_;
  const std::size_t size_;
  const std::vector<std::size_t> numbers_;
  Mutex mutex_;
  std::shared_ptr<const std::string> now_ CASTOR_GUARDED_BY(mutex_);
  std::shared_ptr<const std::string> last_ CASTOR_GUARDED_BY(mutex_);
};

/// Place and timeout with which a rank waits for the others of a group.
struct RankPatience {
  std::shared_ptr<RankPlace> place;  ///< nullptr: one whose waits nobody looks at
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

}  // namespace castor
