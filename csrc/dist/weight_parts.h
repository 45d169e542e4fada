#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
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
/// A rank whose run cannot go on says so, and whoever waits for it throws, as where its process has
/// ended. One that is only done goes on answering until the others are, for a while.
///
/// Owned by the session. Thread-safe; bytes of a part are the caller's to guard, by that meeting.
class WeightParts final : public PayloadSource {
 public:
  /// How long the destructor waits at most for ranks that may still read.
  static constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(10);

  /// `parts`: this rank's, by chunk, in memory that outlives this; empty for those that are not
  /// cut. All ranks' have the same sizes. `messages`: for nothing else. `num_weights`: chunks of
  /// weights; those behind are of gradients.
  WeightParts(std::shared_ptr<RankMessages> messages, std::vector<std::span<std::byte>> parts,
              std::size_t num_weights, std::chrono::milliseconds patience = kPatience);
  ~WeightParts() override;
  WeightParts(const WeightParts&) = delete;
  WeightParts& operator=(const WeightParts&) = delete;

  [[nodiscard]] std::size_t rank() const noexcept { return messages_->rank(); }
  [[nodiscard]] bool cut(ChunkId chunk) const noexcept { return !parts_[index(chunk)].empty(); }
  /// This rank's.
  [[nodiscard]] std::span<std::byte> part(ChunkId chunk) const noexcept {
    return parts_[index(chunk)];
  }

  /// An update of the chunk is about to run, or to be queued: reads from now on are of what it
  /// makes.
  void begin_update(ChunkId chunk);
  /// It is over.
  void end_update(ChunkId chunk);

  /// Of a chunk, by its number: of the ranks' parts in rank order. Its transfer throws Error where
  /// a rank is gone.
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
  class Read;

  void listen() noexcept;
  void take(std::size_t from, const Request& request);
  void answer() noexcept;
  [[nodiscard]] bool next_answer(Wanted& wanted);
  void await_others();
  void say_goodbye() noexcept;
  void await_own(std::size_t chunk, std::uint64_t version);
  [[nodiscard]] Error gone(std::size_t chunk, std::size_t rank, const std::string& why) const;

  const std::shared_ptr<RankMessages> messages_;
  const std::vector<std::span<std::byte>> parts_;
  const std::size_t num_weights_;
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
  std::uint32_t next_tag_ CASTOR_GUARDED_BY(mutex_) = 0;
  bool left_ CASTOR_GUARDED_BY(mutex_) = false;
  std::thread listener_;
  std::thread answerer_;
};

}  // namespace castor
