#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/ids.h"
#include "core/mutex.h"
#include "core/rank_messages.h"
#include "io/stored_payload.h"

namespace castor {

/// Weights, and gradients, of which each rank keeps its part (ZeRO, Rajbhandari et al. 2020,
/// section 5, over chunks), and reads the others' when it needs a chunk. One-sided: who reads asks
/// the others, and a thread on each answers, whatever its rank does at the time. So ranks may run
/// other modules than the others, or none.
///
/// A chunk here is one of weights or, after those, one of gradients (GradientParts).
///
/// Parts change in updates (of gradients: reductions), which all ranks take alike, and which are
/// counted: a read asks for the chunk as it is after as many updates as this rank has begun, and a
/// rank answers when it has finished so many. What keeps updates from parts that somebody still
/// reads is a meeting before them: every rank ends its reads (ChunkStream::await_reads), all meet,
/// and only then they begin. A reduction is such a meeting. Loads likewise, which count nothing.
///
/// Of weights there may be several copies (HSDP; Zhao et al. 2023, section 3.2.2), each cut over
/// ranks that are neighbours: of n ranks and k copies the first n/k have the first. A rank updates
/// its own n-th, keeps those of its replicas, which have its place in the other copies, and
/// reads of the ranks of its copy alone. Behind its update a rank's part goes to its replicas,
/// beside all else: an update is finished where all parts that are kept have come. Before the
/// meeting every rank waits for that too (await_exchanges).
///
/// A rank whose run cannot go on says so, and whoever waits for it throws, as where its process has
/// ended. One that is only done goes on answering until the others are, for a while.
///
/// Owned by the session. Thread-safe; bytes of a part are the caller's to guard, by that meeting.
class WeightParts final : public PayloadSource {
 public:
  /// How long the destructor waits at most for ranks that may still read.
  static constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(10);

  /// `kept`: this rank's, by chunk, in memory that outlives this; empty for those that are not
  /// cut; of `copies` copies as many parts, in rank order. All ranks' have the same sizes.
  /// `messages`: for nothing else. `num_weights`: chunks of weights; those behind are of gradients,
  /// of which there is one copy. Throws InvalidArgument unless `copies` divides the ranks.
  WeightParts(std::shared_ptr<RankMessages> messages, std::vector<std::span<std::byte>> kept,
              std::size_t num_weights, std::size_t copies = 1,
              std::chrono::milliseconds patience = kPatience);
  ~WeightParts() override;
  WeightParts(const WeightParts&) = delete;
  WeightParts& operator=(const WeightParts&) = delete;

  [[nodiscard]] std::size_t rank() const noexcept { return messages_->rank(); }
  [[nodiscard]] bool cut(ChunkId chunk) const noexcept { return !kept_[index(chunk)].empty(); }
  /// That this rank updates.
  [[nodiscard]] std::span<std::byte> part(ChunkId chunk) const noexcept {
    return part_of(index(chunk), rank());
  }
  /// Whose parts of weights this rank keeps, itself among them, in rank order.
  [[nodiscard]] std::vector<std::size_t> kept_ranks() const;
  /// The part of one of those.
  [[nodiscard]] std::span<std::byte> part(ChunkId chunk, std::size_t kept_rank) const noexcept {
    return part_of(index(chunk), kept_rank);
  }

  /// An update of the chunk is about to run, or to be queued: reads from now on are of what it
  /// makes. Throws Error where a rank whose part is kept here is gone.
  void begin_update(ChunkId chunk);
  /// It is over here. May be called from another thread, and waits for no rank.
  void end_update(ChunkId chunk);
  /// Returns when every update that has begun is over, and the parts that are kept have come and
  /// gone. Throws Error where they cannot. No effect with one copy.
  void await_exchanges();

  /// Of a chunk, by its number: of all ranks' parts in rank order. Its transfer throws Error where
  /// a rank is gone that is asked for them.
  [[nodiscard]] IoTransfer start_read(std::size_t number, std::span<std::byte> buffer) override;

  /// This rank reads no more, but answers, and the others know. As the destructor begins.
  void end_reads();
  /// This rank answers no more, and the others know. From any thread, any number of times.
  void leave() noexcept;

  /// To other ranks, and from them.
  [[nodiscard]] std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  struct Request;
  struct Wanted;  // a request, and of whom
  struct Farewell;
  /// A part that is kept on its way, from its rank, or to one that keeps it.
  struct Parcel {
    std::size_t rank = 0;
    std::unique_ptr<RankMessage> message;
  };
  class Read;

  [[nodiscard]] std::size_t num_copies(std::size_t chunk) const noexcept {
    return chunk < num_weights_ ? copies_ : 1;
  }
  /// Ranks that have one of those together.
  [[nodiscard]] std::size_t ranks_of_copy(std::size_t chunk) const noexcept {
    return messages_->size() / num_copies(chunk);
  }
  [[nodiscard]] std::span<std::byte> part_of(std::size_t chunk, std::size_t rank) const noexcept {
    const std::size_t bytes = kept_[chunk].size() / num_copies(chunk);
    return kept_[chunk].subspan(rank / ranks_of_copy(chunk) * bytes, bytes);
  }

  void listen() noexcept;
  void take(std::size_t from, const Request& request);
  void answer() noexcept;
  [[nodiscard]] bool next_answer(Wanted& wanted);
  template <typename Begin>
  void exchange_with_replicas(std::size_t chunk, const Begin& begin) CASTOR_REQUIRES(mutex_);
  void exchange() noexcept;
  template <typename Which>
  void stop_parcels(const Which& which) noexcept CASTOR_REQUIRES(mutex_);
  void drain_exchanges() noexcept;
  void await_others();
  void say_goodbye() noexcept;
  void await_own(std::size_t chunk, std::uint64_t version);
  [[nodiscard]] Error gone(std::size_t chunk, std::size_t rank, const std::string& why) const;

  const std::shared_ptr<RankMessages> messages_;
  const std::vector<std::span<std::byte>> kept_;
  const std::size_t num_weights_;
  const std::size_t copies_;
  const std::chrono::milliseconds patience_;
  std::atomic<std::uint64_t> bytes_sent_ = 0;
  std::atomic<std::uint64_t> bytes_read_ = 0;
  Mutex mutex_;
  std::condition_variable changed_;                                // anything below
  std::vector<std::uint64_t> begun_ CASTOR_GUARDED_BY(mutex_);     // per chunk: updates
  std::vector<std::uint64_t> finished_ CASTOR_GUARDED_BY(mutex_);  // likewise
  std::vector<Wanted> wanted_ CASTOR_GUARDED_BY(mutex_);
  // Per rank: it reads no more; it answers no more either.
  std::vector<bool> done_ CASTOR_GUARDED_BY(mutex_);
  std::vector<bool> gone_ CASTOR_GUARDED_BY(mutex_);
  // To each; a message that is not waited for would leave the other rank's half done.
  std::vector<std::unique_ptr<RankMessage>> dones_ CASTOR_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<RankMessage>> goodbyes_ CASTOR_GUARDED_BY(mutex_);
  std::set<Read*> reads_ CASTOR_GUARDED_BY(mutex_);  // under way
  // Per chunk of which there are several copies: of the update that has begun and not finished.
  std::vector<std::vector<Parcel>> parcels_ CASTOR_GUARDED_BY(mutex_);
  std::deque<std::size_t> updated_ CASTOR_GUARDED_BY(mutex_);  // of those, here
  std::size_t num_exchanges_ CASTOR_GUARDED_BY(mutex_) = 0;    // begun and not finished
  std::exception_ptr lost_ CASTOR_GUARDED_BY(mutex_);          // a part that is kept; it has left
  std::uint32_t next_tag_ CASTOR_GUARDED_BY(mutex_) = 0;
  bool left_ CASTOR_GUARDED_BY(mutex_) = false;
  std::thread listener_;
  std::thread answerer_;
  std::thread exchanger_;  // none with one copy
};

}  // namespace castor
