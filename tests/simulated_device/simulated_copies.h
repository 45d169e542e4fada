#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/copy_engine.h"
#include "parallel/async_copy_engine.h"

namespace castor::testing {

/// The copy engine of the simulated device: one thread a direction, at the speed of a link, and a
/// watch over host storage. From the event at which a copy in begins to read some, that is
/// write-protected until the host may know that the copy is over: it has waited for a fence that is
/// behind the compute stream's wait, or said host_writes. Whoever writes earlier dies of SIGSEGV,
/// in that line.
///
/// Thread-safe. Owned by the session; the SimulatedDevice borrows it.
class SimulatedCopies final : public CopyEngine {
 public:
  explicit SimulatedCopies(std::uint64_t bytes_per_second);
  ~SimulatedCopies() override;

  [[nodiscard]] CopyTicket submit(const CopyRequest& request) override;
  void wait(CopyTicket ticket) override;
  void order(CopyTicket ticket, StreamId stream) override;
  [[nodiscard]] bool done(CopyTicket ticket) override { return inner_.done(ticket); }
  [[nodiscard]] bool asynchronous() const noexcept override { return true; }

  /// Copies whose tickets the compute stream has waited for, so far.
  [[nodiscard]] std::vector<CopyTicket> waited() const;
  /// The host knows that these are over.
  void known_done(std::span<const CopyTicket> tickets);
  void host_writes(std::span<const std::byte> host);

  [[nodiscard]] std::size_t num_copies(CopyDirection direction) const {
    return num_copies_[static_cast<std::size_t>(direction)].load();
  }

 private:
  struct Reader {
    std::span<const std::byte> source;
    bool reading = false;  // the copy has begun
    bool waited = false;   // by the compute stream
  };

  void run(const CopyRequest& request);
  /// Who reads next.
  [[nodiscard]] std::map<CopyTicket, Reader>::iterator next_locked();
  void protect_locked(std::span<const std::byte> source);
  void release_locked(std::map<CopyTicket, Reader>::iterator reader);

  mutable std::mutex mutex_;               // guards the two below
  std::map<CopyTicket, Reader> readers_;   // copies in that the host does not know to be over
  std::map<const std::byte*, int> locks_;  // of pages of host storage: how many read them
  std::atomic<std::size_t> num_copies_[2] = {0, 0};
  AsyncCopyEngine inner_;  // last: its threads use all above
};

}  // namespace castor::testing
