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

/// Weights, and gradients, of which each rank keeps a shard (ZeRO, Rajbhandari et al. 2020, section
/// 5, over chunks), and reads the others' shards when it needs a chunk. Reads are one-sided: the
/// reader asks the other ranks, and a thread on each answers, whatever its rank does at the time.
/// So a rank may run other modules than the others, or none.
///
/// A chunk here is one of weights or, after those, one of gradients (GradientShards).
///
/// Shards change in updates (reductions, for gradients), which all ranks make alike, and which are
/// counted. A read asks for the chunk as it is after as many updates as this rank has begun, and a
/// rank answers when it has finished so many. A barrier before the updates keeps them from shards
/// that somebody still reads: every rank ends its reads (ChunkStream::await_reads), all ranks pass
/// the barrier, and only then the updates begin. A reduction is such a barrier. Loads need it too,
/// but count as no update.
///
/// There may be several copies of the weights (HSDP; Zhao et al. 2023, section 3.2.2), each sharded
/// over neighbouring ranks: of n ranks and k copies the first n/k ranks have the first copy. A rank
/// updates its own n-th of the weights. It also keeps the shards of its replicas, the ranks in its
/// place in the other copies, and reads only from the ranks of its own copy. After its update a
/// rank sends its shard to its replicas, beside all other work: an update is finished when all
/// shards that are kept have come. Before the barrier every rank waits for that too
/// (await_exchanges).
///
/// A rank whose run cannot go on says so. Every rank that waits for it then throws, as it does when
/// that rank's process has ended. A rank that has only finished goes on answering until the others
/// have, for a while.
///
/// Owned by the session. Thread-safe; the caller guards the bytes of a shard, by that barrier.
class WeightShards final : public PayloadSource {
 public:
  /// Longest time that the destructor waits for ranks that may still read.
  static constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(10);

  /// Starts the threads. `kept` are this rank's shards by chunk, in memory that outlives this. An
  /// entry is empty for a chunk that is not sharded; with `copies` copies it has as many shards, in
  /// rank order. All ranks' entries have the same sizes. `messages` are used for nothing else.
  /// `num_weights` is the number of chunks of weights; the chunks behind them are of gradients, of
  /// which there is one copy. Throws InvalidArgument unless `copies` divides the ranks.
  WeightShards(std::shared_ptr<RankMessages> messages, std::vector<std::span<std::byte>> kept,
               std::size_t num_weights, std::size_t copies = 1,
               std::chrono::milliseconds patience = kPatience);
  ~WeightShards() override;
  WeightShards(const WeightShards&) = delete;
  WeightShards& operator=(const WeightShards&) = delete;

  [[nodiscard]] std::size_t rank() const noexcept { return messages_->rank(); }
  [[nodiscard]] bool sharded(ChunkId chunk) const noexcept { return !kept_[index(chunk)].empty(); }
  /// Returns the shard that this rank updates.
  [[nodiscard]] std::span<std::byte> shard(ChunkId chunk) const noexcept {
    return shard_of(index(chunk), rank());
  }
  /// Returns the ranks whose shards of weights this rank keeps, itself among them, in rank order.
  [[nodiscard]] std::vector<std::size_t> kept_ranks() const;
  /// Returns the shard of one of kept_ranks().
  [[nodiscard]] std::span<std::byte> shard(ChunkId chunk, std::size_t kept_rank) const noexcept {
    return shard_of(index(chunk), kept_rank);
  }

  /// Announces that an update of the chunk is about to run, or to be queued: reads from now on are
  /// of its result. Throws Error where a rank whose shard is kept here is gone.
  void begin_update(ChunkId chunk);
  /// Reports that the update is over here. May be called from another thread, and waits for no
  /// rank.
  void end_update(ChunkId chunk);
  /// Waits until every update that has begun is over, and the shards that are kept have come and
  /// gone. Throws Error where they cannot. No effect with one copy.
  void await_exchanges();

  /// Starts to read a chunk, given by its number: all ranks' shards, in rank order. The transfer
  /// throws Error where a rank that is asked for them is gone.
  [[nodiscard]] IoTransfer start_read(std::size_t number, std::span<std::byte> buffer) override;

  /// Tells the others that this rank reads no more, but still answers. The destructor begins with
  /// it.
  void end_reads();
  /// Ends the answers of this rank, and tells the others. May be called from any thread, any number
  /// of times.
  void leave() noexcept;

  /// Returns the bytes sent to other ranks; bytes_read() returns those read from them.
  [[nodiscard]] std::uint64_t bytes_sent() const noexcept { return bytes_sent_; }
  [[nodiscard]] std::uint64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  struct Request;
  struct Wanted;  // a request, and the rank that sent it
  struct Farewell;
  /// A shard of a replica under way, from the rank that updates it or to one that keeps it.
  struct Parcel {
    std::size_t rank = 0;
    std::unique_ptr<RankMessage> message;
  };
  class Read;

  [[nodiscard]] std::size_t num_copies(std::size_t chunk) const noexcept {
    return chunk < num_weights_ ? copies_ : 1;
  }
  /// Returns the number of ranks that have one copy together.
  [[nodiscard]] std::size_t ranks_of_copy(std::size_t chunk) const noexcept {
    return messages_->size() / num_copies(chunk);
  }
  [[nodiscard]] std::span<std::byte> shard_of(std::size_t chunk, std::size_t rank) const noexcept {
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
  // Notified when anything below changes.
  std::condition_variable changed_;
  std::vector<std::uint64_t> begun_ CASTOR_GUARDED_BY(mutex_);     // per chunk: number of updates
  std::vector<std::uint64_t> finished_ CASTOR_GUARDED_BY(mutex_);  // likewise
  std::vector<Wanted> wanted_ CASTOR_GUARDED_BY(mutex_);
  // Per rank: it reads no more; it answers no more either.
  std::vector<bool> done_ CASTOR_GUARDED_BY(mutex_);
  std::vector<bool> gone_ CASTOR_GUARDED_BY(mutex_);
  // Messages to each rank; one that is not waited for would leave the other rank's half done.
  std::vector<std::unique_ptr<RankMessage>> dones_ CASTOR_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<RankMessage>> goodbyes_ CASTOR_GUARDED_BY(mutex_);
  std::set<Read*> reads_ CASTOR_GUARDED_BY(mutex_);  // under way
  // Per chunk with several copies: parcels of the update that has begun and not finished.
  std::vector<std::vector<Parcel>> parcels_ CASTOR_GUARDED_BY(mutex_);
  std::deque<std::size_t> updated_ CASTOR_GUARDED_BY(mutex_);  // such chunks, updated here
  std::size_t num_exchanges_ CASTOR_GUARDED_BY(mutex_) = 0;    // begun and not finished
  // Loss of a shard that is kept here; this rank has then left.
  std::exception_ptr lost_ CASTOR_GUARDED_BY(mutex_);
  std::uint32_t next_tag_ CASTOR_GUARDED_BY(mutex_) = 0;
  bool left_ CASTOR_GUARDED_BY(mutex_) = false;
  std::thread listener_;
  std::thread answerer_;
  std::thread exchanger_;  // none with one copy
};

}  // namespace castor
