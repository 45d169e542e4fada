#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rank_messages.h"

namespace castor {

/// Seam between the ranks that train one model together: process groups, and memory that
/// they share (csrc/dist); threads of one process in tests. Every rank makes
/// the same calls in the same order; each returns when it is done here, and throws Error where
/// another rank is gone. One call at a time.
class Collectives {
 public:
  virtual ~Collectives() = default;

  [[nodiscard]] virtual std::size_t rank() const noexcept = 0;
  [[nodiscard]] virtual std::size_t size() const noexcept = 0;

  /// `all` becomes the `own` of every rank, in rank order. All have the same size; `own` may be
  /// this rank's part of `all`.
  virtual void all_gather(std::span<const std::byte> own, std::span<std::byte> all) = 0;
  /// Of `sent`, cut into size() equal parts, rank r gets the r-th. `received`, as large and apart
  /// from it, becomes what every rank sent to this one, in rank order.
  virtual void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
  /// `sent` goes to the next rank, the last one's to the first; `received`, as large and apart from
  /// it, becomes what the rank before sent.
  virtual void ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
  /// This rank takes no further part: its own calls throw from now on. Through shared memory
  /// whoever waits for it throws at once, as does a call of its own that is under way; over a
  /// group they do when this process ends, or at their timeout. From any thread.
  virtual void leave() noexcept = 0;
  /// For reports: "gloo".
  [[nodiscard]] virtual std::string description() const = 0;

  /// Those of these ranks that share memory with this one, in their order; nullptr: none do. They
  /// are all, or as many on each of several machines, one machine's behind another's.
  [[nodiscard]] virtual Collectives* node() noexcept { return nullptr; }
  /// Asked where another call has failed: who of these has ended, "rank 1 (process 234) has ended";
  /// "": nobody, or it is not known here.
  [[nodiscard]] virtual std::string ended() const { return ""; }
  /// Between ranks of several such machines, by their place among all; nullptr elsewhere.
  [[nodiscard]] virtual RankMessages* messages() noexcept { return nullptr; }

  /// What this rank does from now on, to be told where it waits for the others: "ends backward pass
  /// 2 of step 1"; "": nothing, another thread of it tells. From any thread.
  virtual void set_place(std::string place) = 0;
};

/// The ranks that train a model together, as groups whose collectives do not wait for each other.
struct RankGroups {
  std::shared_ptr<Collectives> passes;     ///< of the thread that runs forward, backward and step
  std::shared_ptr<Collectives> gradients;  ///< of the one that reduces beside backward
  std::shared_ptr<Collectives> updates;    ///< of the one that runs updates, which may be another
  /// For reads of others' parts of weights, where each keeps its own (ZeRO-3); nullptr: none does.
  std::shared_ptr<RankMessages> reads;
  std::string link;  ///< for reports: what the bytes go through, and why
};

/// What each rank gives, in rank order.
template <typename T>
std::vector<T> gather(Collectives& ranks, const T& own) {
  std::vector<T> all(ranks.size());
  ranks.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  return all;
}

/// Returns when every rank is here.
inline void meet(Collectives& ranks) { static_cast<void>(gather(ranks, std::byte{})); }

/// What `call` returns; where it throws, this rank has left the others, so that none waits for it.
template <typename Call>
auto or_leave(Collectives& ranks, const Call& call) {
  try {
    return call();
  } catch (...) {
    ranks.leave();
    throw;
  }
}

/// What a call throws where another rank is gone; `why`: "rank 1 (process 234) has ended".
[[nodiscard]] Error lost_ranks(const Collectives& own, const std::string& why);
[[nodiscard]] Error lost_ranks(std::size_t rank, std::size_t size, const std::string& why);

}  // namespace castor
