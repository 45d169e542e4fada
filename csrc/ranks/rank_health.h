#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/collectives.h"
#include "core/mutex.h"

namespace castor {

/// Health of all ranks of a run, as one of them knows it. Each rank publishes a record with every
/// heartbeat: its host, its process and where it is. A thread publishes and reads the records
/// (Heartbeats); another one calls look() now and then and ends waits for a lost rank.
///
/// A rank that was heard, and whose heartbeat then stands still, is lost. One that was never heard,
/// or that has ended well, is not. Ranks are numbered as in the run. Thread-safe; its mutex is
/// taken last.
class RankHealth {
 public:
  /// `interval`: time between two heartbeats. `silence`: time, in looks, after which a rank that is
  /// not heard is lost.
  RankHealth(std::size_t rank, std::size_t size, std::string host, int process,
             std::chrono::milliseconds interval, std::chrono::milliseconds silence);

  [[nodiscard]] std::size_t rank() const noexcept { return rank_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// Returns the process that publishes the records.
  [[nodiscard]] int process() const noexcept { return process_; }

  // For the threads of this rank.
  /// Says which module this rank has entered; `pass`: "forward". An empty name is the model's.
  void enter(std::string_view pass, std::string_view module);
  /// Says what this rank does now, like Collectives::set_place.
  void set_place(const std::string& place);
  /// Returns a rank that is lost. It waits for nothing.
  [[nodiscard]] LostRank find_lost() const;
  /// Returns what a message adds to the name of a lost rank: ", on host node7, last heard in the
  /// forward of module 'layers.2'". Empty: this rank has never heard of it.
  [[nodiscard]] std::string last_of(std::size_t rank) const;
  /// Returns which rank is lost where the connection to `rank` has failed with `error`. It waits
  /// for a few heartbeats, because that rank may have ended only when it lost another one.
  [[nodiscard]] std::string explain(std::size_t rank, const std::string& error);

  // For the thread that publishes and reads.
  /// Returns this rank's next record.
  [[nodiscard]] std::string beat();
  /// Takes the latest record of another rank.
  void hear(std::size_t rank, std::string_view record);
  /// Says that all records which there are have been read.
  void end_round();
  /// Says that records can be read no more, because the process that keeps them has ended.
  void end_records();
  /// Waits until the next record is due. Returns false where this rank has ended.
  [[nodiscard]] bool await_beat();

  /// Looks at the other ranks; `passed`: time since the last look in which this process ran.
  void look(std::chrono::milliseconds passed);
  /// Makes the next record this rank's last, which says that it has ended well.
  void end();

 private:
  struct Record {
    std::uint64_t beat = 0;
    bool ended = false;
    int process = 0;
    std::optional<std::size_t> blamed;  // a rank that this one has lost
    std::string host;
    std::string phase;
  };
  struct Heard {
    Record record;
    bool alive = false;                   // the heartbeat has moved
    std::chrono::milliseconds silence{};  // since it moved
  };

  [[nodiscard]] static Record parse(std::string_view text);
  [[nodiscard]] std::string own_phase() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::string name_of(std::size_t rank) const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::string rest_of(std::size_t rank) const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::optional<std::size_t> silent() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] std::optional<std::size_t> blamed() const CASTOR_REQUIRES(mutex_);
  [[nodiscard]] bool store_is_silent(std::chrono::milliseconds since) const CASTOR_REQUIRES(mutex_);
  void blame(std::size_t rank) CASTOR_REQUIRES(mutex_);

  const std::size_t rank_;
  const std::size_t size_;
  const int process_;
  const std::chrono::milliseconds interval_;
  const std::chrono::milliseconds silence_;
  mutable Mutex mutex_;
  std::condition_variable changed_;
  Record own_ CASTOR_GUARDED_BY(mutex_);
  std::string pass_ CASTOR_GUARDED_BY(mutex_);  // of the module entered last; empty: none
  std::string module_ CASTOR_GUARDED_BY(mutex_);
  std::string place_ CASTOR_GUARDED_BY(mutex_);  // set since; empty: none
  std::vector<std::optional<Heard>> heard_ CASTOR_GUARDED_BY(mutex_);
  std::uint64_t rounds_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::uint64_t rounds_at_look_ CASTOR_GUARDED_BY(mutex_) = 0;
  std::chrono::milliseconds since_round_ CASTOR_GUARDED_BY(mutex_){};  // looks without a round
  bool over_ CASTOR_GUARDED_BY(mutex_) = false;  // no record can be read any more
  bool due_ CASTOR_GUARDED_BY(mutex_) = true;    // a record is to be published at once
};

}  // namespace castor
