#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "ranks/rank_health.h"
#include "ranks/rank_waits.h"

namespace castor {

/// Heartbeats of the ranks of a run, through torch.distributed's store. A thread publishes this
/// rank's record and reads the others', over a connection of its own. look() ends waits for a lost
/// rank, in groups that share no memory as well.
///
/// The thread needs no lock of Python's, so that a rank which computes for long is heard. It may
/// wait in the store for as long as the process that keeps the store is stopped. Therefore nobody
/// waits for it long: it owns all that it uses, and may outlive this object. In a forked child,
/// where it does not run, this object does nothing.
class Heartbeats {
 public:
  struct Options {
    std::string group;  ///< name of a process group of all ranks, whose store is used
    std::string host;   ///< name of this machine, for messages
    std::chrono::milliseconds interval{};
    std::chrono::milliseconds silence{};  ///< after which a rank is lost
  };

  /// Begins, and says so to `waits`. Throws UsageError where there is no such group, and Error
  /// where its store gives no connection.
  Heartbeats(const Options& options, std::shared_ptr<RankWaits> waits);
  /// Calls end().
  ~Heartbeats();
  Heartbeats(const Heartbeats&) = delete;
  Heartbeats& operator=(const Heartbeats&) = delete;

  /// Ends the waits of this process while a rank is lost. Called about once a second, by one
  /// thread.
  void look();
  /// Publishes that this rank has ended well, and ends. Waits for the thread for a second at most.
  /// From any thread.
  void end() noexcept;

 private:
  struct Thread;

  const std::shared_ptr<RankWaits> waits_;
  const std::shared_ptr<RankHealth> health_;
  const std::shared_ptr<Thread> thread_;
  std::atomic<bool> ended_ = false;
  std::chrono::steady_clock::time_point looked_ = std::chrono::steady_clock::now();
};

}  // namespace castor
