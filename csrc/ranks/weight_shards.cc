#include "ranks/weight_shards.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace castor {
namespace {

constexpr std::uint32_t kRequests = 0;  // their tag; answers have others, one for each read
constexpr std::uint32_t kMostTags = std::uint32_t{1} << 30;

// Of the parts of a chunk that are kept: versions follow each other.
std::uint32_t tag_of_shards(std::size_t chunk) {
  return kMostTags + 1 + static_cast<std::uint32_t>(chunk);
}

}  // namespace

/// What a rank sends to another.
struct WeightShards::Request {
  enum class Kind : std::uint32_t { kRead, kDone, kGoodbye };

  Kind kind = Kind::kRead;
  std::uint32_t tag = 0;  // of the answer
  std::uint64_t chunk = 0;
  std::uint64_t version = 0;
};

struct WeightShards::Wanted {
  std::size_t from = 0;
  Request request;
};

/// One chunk's parts on their way here.
class WeightShards::Read final : public IoTransfer::State {
 public:
  Read(WeightShards& shards, const Request& request, std::span<std::byte> buffer)
      : shards_(shards), request_(request), buffer_(buffer), from_(shards.messages_->size()) {}
  ~Read() override {
    const MutexLock lock(shards_.mutex_);
    shards_.reads_.erase(this);
  }
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;

  /// Asks all others of this rank's copy. Takes the parts that it is a read of, whose mutex is
  /// held.
  void ask(const WeightShards& shards) CASTOR_REQUIRES(shards.mutex_) {
    const std::size_t own = shards.messages_->rank();
    const std::size_t ranks = shards.ranks_of_copy(request_.chunk);
    const std::size_t first = own / ranks * ranks;
    for (std::size_t rank = first; rank < first + ranks; ++rank) {
      if (rank == own) {
        continue;
      }
      if (shards.gone_[rank]) {
        fail(rank, none_heard(shards) ? "a rank has ended, and none is heard any more"
                                      : "it has let go of the model");
        return;
      }
      try {
        for (std::size_t shard = rank % ranks; shard < from_.size(); shard += ranks) {
          from_[rank].answers.push_back(
              shards.messages_->receive(rank, request_.tag, shard_of(shard)));
        }
        from_[rank].request =
            shards.messages_->send(rank, kRequests, std::as_bytes(std::span(&request_, 1)));
      } catch (const Error& error) {
        fail(rank, error.what());
        return;
      }
    }
  }
  /// The rank will not answer.
  void stop(std::size_t rank) noexcept {
    if (from_[rank].request) {
      from_[rank].request->stop();
    }
    for (const auto& answer : from_[rank].answers) {
      answer->stop();
    }
  }

  void wait() override {
    std::exception_ptr first = failure_;
    if (!first) {
      try {
        shards_.await_own(request_.chunk, request_.version);
        const std::size_t ranks = shards_.ranks_of_copy(request_.chunk);
        for (std::size_t rank = shards_.rank() % ranks; rank < from_.size(); rank += ranks) {
          const auto kept = shards_.shard_of(request_.chunk, rank);
          std::memcpy(shard_of(rank).data(), kept.data(), kept.size());
        }
      } catch (const Error&) {
        first = std::current_exception();
      }
    }
    // All of them, whatever one says: nothing may come into the buffer afterwards.
    for (std::size_t rank = 0; rank < from_.size(); ++rank) {
      try {
        end(rank);
      } catch (const Error& error) {
        first = first ? first
                      : std::make_exception_ptr(shards_.gone(request_.chunk, rank, error.what()));
      }
    }
    if (first) {
      std::rethrow_exception(first);
    }
  }
  void drain() noexcept override {
    for (std::size_t rank = 0; rank < from_.size(); ++rank) {
      try {
        end(rank);
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): nobody wants it any more
      }
    }
  }

 private:
  struct From {
    std::unique_ptr<RankMessage> request;
    std::vector<std::unique_ptr<RankMessage>> answers;  // one for each part that the rank keeps
  };

  [[nodiscard]] std::span<std::byte> shard_of(std::size_t rank) const {
    const std::size_t bytes = buffer_.size() / from_.size();
    return buffer_.subspan(rank * bytes, bytes);
  }
  // Of two or more others: whichever it was, this one may not be to blame.
  [[nodiscard]] static bool none_heard(const WeightShards& shards) CASTOR_REQUIRES(shards.mutex_) {
    const auto num_gone = std::count(shards.gone_.begin(), shards.gone_.end(), true);
    return num_gone > 1 && static_cast<std::size_t>(num_gone) + 1 == shards.messages_->size();
  }
  // Those who have not been asked do not answer.
  void fail(std::size_t rank, const std::string& why) {
    failure_ = std::make_exception_ptr(shards_.gone(request_.chunk, rank, why));
    stop(rank);
  }
  void end(std::size_t rank) {
    std::exception_ptr first;
    const auto wait = [&](RankMessage& message) {
      try {
        message.wait();
      } catch (const Error&) {
        first = first ? first : std::current_exception();
      }
    };
    if (from_[rank].request) {
      wait(*from_[rank].request);
    }
    for (const auto& answer : from_[rank].answers) {
      wait(*answer);
    }
    if (first) {
      std::rethrow_exception(first);
    }
  }

  WeightShards& shards_;
  const Request request_;
  const std::span<std::byte> buffer_;
  std::vector<From> from_;  // per rank
  std::exception_ptr failure_;
};

WeightShards::WeightShards(std::shared_ptr<RankMessages> messages,
                           std::vector<std::span<std::byte>> kept, std::size_t num_weights,
                           std::size_t copies, std::chrono::milliseconds patience)
    : messages_(std::move(messages)),
      kept_(std::move(kept)),
      num_weights_(num_weights),
      copies_(copies),
      patience_(patience),
      begun_(kept_.size(), 0),
      finished_(kept_.size(), 0),
      done_(messages_->size(), false),
      gone_(messages_->size(), false),
      dones_(messages_->size()),
      goodbyes_(messages_->size()),
      parcels_(num_weights_) {
  if (copies_ == 0 || messages_->size() % copies_ != 0) {
    throw InvalidArgument(std::to_string(messages_->size()) + " ranks cannot keep " +
                          std::to_string(copies_) + " copies of the weights");
  }
  listener_ = std::thread([this] { listen(); });
  answerer_ = std::thread([this] { answer(); });
  if (copies_ > 1) {
    exchanger_ = std::thread([this] { exchange(); });
  }
}

WeightShards::~WeightShards() {
  end_reads();
  await_others();
  leave();
  if (exchanger_.joinable()) {
    exchanger_.join();
  }
  drain_exchanges();
  answerer_.join();  // it says goodbye; until the others know, theirs have to be heard
  messages_->stop();
  listener_.join();
}

Error WeightShards::gone(std::size_t chunk, std::size_t rank, const std::string& why) const {
  const bool weights = chunk < num_weights_;
  return Error("rank " + std::to_string(messages_->rank()) + " of " +
               std::to_string(messages_->size()) + " lost the part of the " +
               (weights ? "weights" : "gradients") + " that rank " + std::to_string(rank) +
               " keeps (zero_stage=" + (weights ? "3" : "2 or 3") + "): " + why +
               ". A rank that failed says why in its own output; start all again, from the last "
               "checkpoint. One that ends while others still read is waited for with "
               "torch.distributed.barrier()");
}

std::vector<std::size_t> WeightShards::kept_ranks() const {
  std::vector<std::size_t> ranks;
  const std::size_t of_copy = messages_->size() / copies_;
  for (std::size_t rank = messages_->rank() % of_copy; rank < messages_->size(); rank += of_copy) {
    ranks.push_back(rank);
  }
  return ranks;
}

// What others keep of this rank's, and this one of theirs. A failure ends the run here.
template <typename Begin>
void WeightShards::exchange_with_replicas(std::size_t chunk, const Begin& begin) {
  for (const std::size_t rank : kept_ranks()) {
    if (rank == messages_->rank() || left_) {
      continue;
    }
    try {
      if (gone_[rank]) {
        throw Error("it has let go of the model");
      }
      parcels_[chunk].push_back({rank, begin(rank)});
    } catch (const Error& error) {
      lost_ = std::make_exception_ptr(gone(chunk, rank, error.what()));
      left_ = true;
    }
  }
}

void WeightShards::begin_update(ChunkId chunk) {
  const std::size_t number = index(chunk);
  std::exception_ptr lost;
  {
    const MutexLock lock(mutex_);
    ++begun_[number];
    if (num_copies(number) > 1) {
      ++num_exchanges_;
      exchange_with_replicas(number, [&](std::size_t rank) {
        const std::span<std::byte> shard = shard_of(number, rank);
        bytes_read_ += shard.size();
        return messages_->receive(rank, tag_of_shards(number), shard);
      });
    }
    lost = lost_;
  }
  if (lost) {
    changed_.notify_all();
    std::rethrow_exception(lost);
  }
}

void WeightShards::end_update(ChunkId chunk) {
  const std::size_t number = index(chunk);
  {
    const MutexLock lock(mutex_);
    if (num_copies(number) > 1) {
      exchange_with_replicas(number, [&](std::size_t rank) {
        const std::span<const std::byte> shard = shard_of(number, messages_->rank());
        bytes_sent_ += shard.size();
        return messages_->send(rank, tag_of_shards(number), shard);
      });
      updated_.push_back(number);
    } else {
      ++finished_[number];
    }
  }
  changed_.notify_all();
}

void WeightShards::await_exchanges() {
  MutexLock lock(mutex_);
  changed_.wait(lock.native(),
                [this]() CASTOR_REQUIRES(mutex_) { return left_ || num_exchanges_ == 0; });
  if (num_exchanges_ > 0) {
    std::rethrow_exception(
        lost_ ? lost_
              : std::make_exception_ptr(
                    Error("rank " + std::to_string(messages_->rank()) + " of " +
                          std::to_string(messages_->size()) +
                          " has let go of the others when its own run could not go on: start all "
                          "again, from the last checkpoint")));
  }
}

// Waits for what is under way of one chunk after the other, as they have been updated here: a
// replica sends its part behind its own update, which waits for nobody.
void WeightShards::exchange() noexcept {
  MutexLock lock(mutex_);
  for (;;) {
    changed_.wait(lock.native(),
                  [this]() CASTOR_REQUIRES(mutex_) { return left_ || !updated_.empty(); });
    if (left_) {
      break;
    }
    const std::size_t chunk = updated_.front();
    updated_.pop_front();
    std::vector<Parcel>& parcels = parcels_[chunk];  // nobody's else until the update is finished
    lock.unlock();
    std::exception_ptr failure;
    for (const Parcel& parcel : parcels) {
      try {
        parcel.message->wait();
      } catch (const Error& error) {
        failure =
            failure ? failure : std::make_exception_ptr(gone(chunk, parcel.rank, error.what()));
      }
    }
    lock.lock();
    if (failure) {
      lost_ = lost_ ? lost_ : failure;
      left_ = true;
    } else {
      parcels.clear();
      ++finished_[chunk];
      --num_exchanges_;
    }
    changed_.notify_all();
  }
}

IoTransfer WeightShards::start_read(std::size_t number, std::span<std::byte> buffer) {
  const MutexLock lock(mutex_);
  next_tag_ = next_tag_ % kMostTags + 1;
  bytes_read_ += buffer.size() - kept_[number].size();
  auto read = std::make_shared<Read>(
      *this, Request{.tag = next_tag_, .chunk = number, .version = begun_[number]}, buffer);
  read->ask(*this);
  reads_.insert(read.get());
  return IoTransfer(std::move(read));
}

void WeightShards::await_own(std::size_t chunk, std::uint64_t version) {
  MutexLock lock(mutex_);
  changed_.wait(lock.native(),
                [&]() CASTOR_REQUIRES(mutex_) { return left_ || finished_[chunk] >= version; });
  if (finished_[chunk] < version && lost_) {
    std::rethrow_exception(lost_);
  }
  if (finished_[chunk] < version) {
    throw gone(chunk, messages_->rank(), "its own run could not go on");
  }
}

/// The messages of ranks to each other at the end.
struct WeightShards::Farewell {
  static constexpr Request kDone{.kind = Request::Kind::kDone};
  static constexpr Request kGoodbye{.kind = Request::Kind::kGoodbye};
};

void WeightShards::listen() noexcept {
  try {
    Request request;
    while (const auto from =
               messages_->receive_any(kRequests, std::as_writable_bytes(std::span(&request, 1)))) {
      take(*from, request);
    }
  } catch (const std::exception&) {
    // A rank is gone, and now none is heard any more: who waits for one here is told. The others
    // may not know: a receive that gloo begins after the failure does not end with it.
    for (std::size_t rank = 0; rank < messages_->size(); ++rank) {
      const MutexLock lock(mutex_);
      if (rank != messages_->rank() && !gone_[rank] && !goodbyes_[rank]) {
        try {
          goodbyes_[rank] =
              messages_->send(rank, kRequests, std::as_bytes(std::span(&Farewell::kGoodbye, 1)));
        } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it is the one that is gone
        }
      }
    }
    for (std::size_t rank = 0; rank < messages_->size(); ++rank) {
      if (rank != messages_->rank()) {
        take(rank, {.kind = Request::Kind::kGoodbye});
      }
    }
    leave();
  }
}

template <typename Which>
void WeightShards::stop_parcels(const Which& which) noexcept {
  for (const std::vector<Parcel>& parcels : parcels_) {
    for (const Parcel& parcel : parcels) {
      if (which(parcel)) {
        parcel.message->stop();
      }
    }
  }
}

// Nothing may come into memory that goes.
void WeightShards::drain_exchanges() noexcept {
  const MutexLock lock(mutex_);
  stop_parcels([](const Parcel&) { return true; });
  for (const std::vector<Parcel>& parcels : parcels_) {
    for (const Parcel& parcel : parcels) {
      try {
        parcel.message->wait();
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): nobody wants it any more
      }
    }
  }
}

void WeightShards::take(std::size_t from, const Request& request) {
  {
    const MutexLock lock(mutex_);
    if (request.kind == Request::Kind::kRead) {
      wanted_.push_back({from, request});
    } else if (request.kind == Request::Kind::kDone) {
      done_[from] = true;
    } else {
      done_[from] = gone_[from] = true;
      for (const auto* const told : {&dones_[from], &goodbyes_[from]}) {
        if (*told) {
          (*told)->stop();  // it may not listen any more
        }
      }
      for (Read* const read : reads_) {
        read->stop(from);
      }
      stop_parcels([from](const Parcel& parcel) { return parcel.rank == from; });
    }
  }
  changed_.notify_all();
}

// Waits for a request whose version is there; false: this rank has left.
bool WeightShards::next_answer(Wanted& wanted) {
  MutexLock lock(mutex_);
  auto ready = wanted_.end();
  changed_.wait(lock.native(), [&]() CASTOR_REQUIRES(mutex_) {
    ready = std::find_if(wanted_.begin(), wanted_.end(),
                         [&](const Wanted& one) CASTOR_REQUIRES(mutex_) {
                           return finished_[one.request.chunk] >= one.request.version;
                         });
    return left_ || ready != wanted_.end();
  });
  if (ready == wanted_.end()) {
    return false;
  }
  wanted = *ready;
  wanted_.erase(ready);
  if (finished_[wanted.request.chunk] > wanted.request.version) {
    left_ = true;  // ranks have not met before this update: nothing here can be trusted
    return false;
  }
  return true;
}

void WeightShards::answer() noexcept {
  Wanted wanted;
  while (next_answer(wanted)) {
    const std::span<const std::byte> kept = kept_[wanted.request.chunk];
    const std::size_t num_shards = num_copies(wanted.request.chunk);
    const std::size_t bytes = kept.size() / num_shards;
    try {
      bytes_sent_ += kept.size();  // before that rank has it, and may report
      for (std::size_t shard = 0; shard < num_shards; ++shard) {
        messages_->send(wanted.from, wanted.request.tag, kept.subspan(shard * bytes, bytes))
            ->wait();
      }
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): that rank is gone, or was told
    }
  }
  say_goodbye();
}

void WeightShards::end_reads() {
  const MutexLock lock(mutex_);
  for (std::size_t rank = 0; rank < messages_->size() && !left_; ++rank) {
    try {
      if (rank != messages_->rank() && !gone_[rank] && !dones_[rank]) {
        dones_[rank] =
            messages_->send(rank, kRequests, std::as_bytes(std::span(&Farewell::kDone, 1)));
      }
    } catch (const Error&) {
      done_[rank] = true;  // it has ended
    }
  }
  done_[messages_->rank()] = true;
}

// Not for ever: one that has failed may be needed elsewhere to be found out.
void WeightShards::await_others() {
  MutexLock lock(mutex_);
  changed_.wait_for(lock.native(), patience_, [this]() CASTOR_REQUIRES(mutex_) {
    return left_ ||
           (num_exchanges_ == 0 && std::find(done_.begin(), done_.end(), false) == done_.end());
  });
}

// Those who have been answered have their answers: nobody waits for what will not come. A rank
// listens until all others know that it is gone, or are gone themselves.
void WeightShards::say_goodbye() noexcept {
  for (std::size_t rank = 0; rank < messages_->size(); ++rank) {
    std::array<RankMessage*, 2> told{};
    try {
      {
        const MutexLock lock(mutex_);
        told[0] = dones_[rank].get();
        if (rank != messages_->rank() && !gone_[rank]) {
          goodbyes_[rank] =
              messages_->send(rank, kRequests, std::as_bytes(std::span(&Farewell::kGoodbye, 1)));
          told[1] = goodbyes_[rank].get();
        }
      }
      for (RankMessage* const one : told) {
        if (one != nullptr) {
          one->wait();
        }
      }
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): it is gone itself
    }
  }
}

void WeightShards::leave() noexcept {
  {
    const MutexLock lock(mutex_);
    left_ = true;
    stop_parcels([](const Parcel&) { return true; });
  }
  changed_.notify_all();
}

}  // namespace castor
