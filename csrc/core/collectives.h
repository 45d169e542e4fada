#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device_reduction.h"
#include "core/error.h"
#include "core/ledger.h"
#include "core/rank_messages.h"

namespace castor {

/// A rank without which the others of its group cannot go on.
struct LostRank {
  std::string why;  ///< "rank 1 (process 234) has ended"; empty: no rank is known to be lost
  bool may_return = false;  ///< it is stopped, and may be continued
};

/// Seam between the ranks that train one model together: process groups, and memory that ranks
/// share (csrc/ranks); threads of one process in tests. Every rank makes the same calls in the same
/// order. Each call returns when it is done on this rank, and throws Error where another rank is
/// gone. One call at a time.
class Collectives {
 public:
  virtual ~Collectives() = default;

  [[nodiscard]] virtual std::size_t rank() const noexcept = 0;
  [[nodiscard]] virtual std::size_t size() const noexcept = 0;

  /// Fills `all` with the `own` of every rank, in rank order. All have the same size; `own` may be
  /// this rank's shard of `all`.
  virtual void all_gather(std::span<const std::byte> own, std::span<std::byte> all) = 0;
  /// Sends the r-th of size() equal shards of `sent` to rank r. Fills `received`, which has the
  /// same size and does not overlap `sent`, with the shards that every rank sent to this one, in
  /// rank order.
  virtual void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
  /// Sends `sent` to the next rank, from the last one to the first. Fills `received`, which has the
  /// same size and does not overlap `sent`, with the bytes that the previous rank sent.
  virtual void ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
  /// Takes this rank out of the collectives for good: its own calls throw from now on. Through
  /// shared memory, ranks that wait for it throw at once, and so does a call of its own that is
  /// under way. Over a process group they throw when this process ends, or at their timeout. From
  /// any thread.
  virtual void leave() noexcept = 0;
  /// Returns this rank's name for messages: "rank 1 of 4". Numbers are those of the run where this
  /// object knows them, else those of the group.
  [[nodiscard]] virtual std::string name() const;
  /// Returns the name of a rank of this group, numbered likewise: "rank 3".
  [[nodiscard]] virtual std::string name_of(std::size_t rank) const;
  /// Returns a description for reports: "gloo".
  [[nodiscard]] virtual std::string description() const = 0;

  /// Returns the ranks of this group that share memory with this one, in their order; nullptr: none
  /// do. They are all ranks, or an equal number on each of several machines, numbered machine by
  /// machine.
  [[nodiscard]] virtual Collectives* node() noexcept { return nullptr; }
  /// Returns which of these ranks has ended: "rank 1 (process 234) has ended". Empty: none has, or
  /// this rank does not know. Called where another call has failed.
  [[nodiscard]] virtual std::string ended() const { return ""; }
  /// Returns a rank that has ended, has left or is stopped: one of this machine, or one that this
  /// rank has not heard for long. It waits for nothing. From any thread.
  [[nodiscard]] virtual LostRank find_lost() const { return {}; }
  /// Returns the messages between ranks of several such machines, numbered by their place among
  /// all; nullptr elsewhere.
  [[nodiscard]] virtual RankMessages* messages() noexcept { return nullptr; }

  /// Sets the text that says what this rank does from now on, shown where it waits for the others:
  /// "ends backward pass 2 of step 1". Empty: nothing, because another thread of the rank sets it.
  /// From any thread.
  virtual void set_place(std::string place) = 0;
};

/// Groups of the ranks that train a model together, whose collectives do not wait for each other.
struct RankGroups {
  static constexpr std::size_t kAnyBytes = std::numeric_limits<std::size_t>::max();

  std::shared_ptr<Collectives> passes;     ///< for the thread that runs forward, backward, step
  std::shared_ptr<Collectives> gradients;  ///< for the thread that reduces beside backward
  std::shared_ptr<Collectives> updates;    ///< for the update thread, which may be another
  /// Messages that read other ranks' shards of weights, where each rank stores its own (ZeRO-3);
  /// nullptr: none does.
  std::shared_ptr<RankMessages> reads;
  /// Sums of gradients on the ranks' devices, for the thread of `gradients`; nullptr: the host adds
  /// them up, in rank order.
  std::shared_ptr<DeviceReduction> sums;
  /// All-gathers of weights on devices, for the thread of `updates`; nullptr: they go through the
  /// host.
  std::shared_ptr<DeviceReduction> gathers;
  /// Device bytes that the communicators of `sums` and `gathers` take.
  std::size_t communicator_bytes = 0;
  /// Reservation of those bytes, which the session keeps.
  std::shared_ptr<Reservation> communicators;
  /// Device bytes that the communicators, the window and the buffers of gradients may take on this
  /// rank. Where they take more on any rank, all ranks do without `sums` and `gathers`.
  std::size_t most_reduction_bytes = kAnyBytes;
  /// Text for reports: why the host reduces gradients. Empty where `sums` does, or where there is
  /// no other way.
  std::string reduces_on_host;
  std::string link;  ///< for reports: the transport of the bytes, and why it is used
};

/// Returns the `own` of each rank, in rank order.
template <typename T>
std::vector<T> gather(Collectives& ranks, const T& own) {
  std::vector<T> all(ranks.size());
  ranks.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

/// Returns whether every rank says so.
[[nodiscard]] inline bool all_true(Collectives& ranks, bool own) {
  for (const std::uint8_t other : gather(ranks, static_cast<std::uint8_t>(own))) {
    if (other == 0) {
      return false;
    }
  }
  return true;
}

/// Returns when every rank is here.
inline void barrier(Collectives& ranks) { static_cast<void>(gather(ranks, std::byte{})); }

/// Returns the result of `call`. Where it throws, this rank leaves the others, so that none waits
/// for it, and the exception goes on.
template <typename Call>
auto or_leave(Collectives& ranks, const Call& call) {
  try {
    return call();
  } catch (...) {
    ranks.leave();
    throw;
  }
}

/// Returns the error of a call where another rank is gone; `why`: "rank 1 (process 234) has ended".
[[nodiscard]] Error lost_ranks(const Collectives& own, const std::string& why);
/// Returns the name of a rank of so many, for messages: "rank 1 of 4".
[[nodiscard]] std::string name_of_rank(std::size_t rank, std::size_t size);

}  // namespace castor
