#include "dist/weight_parts.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace castor {
namespace {

constexpr std::uint32_t kRequests = 0;  // their tag; answers have others, one for each read
constexpr std::uint32_t kMostTags = std::uint32_t{1} << 30;

}  // namespace

/// What a rank sends to another.
struct WeightParts::Request {
  enum class Kind : std::uint32_t { kRead, kDone, kGoodbye };

  Kind kind = Kind::kRead;
  std::uint32_t tag = 0;  // of the answer
  std::uint64_t chunk = 0;
  std::uint64_t version = 0;
};

struct WeightParts::Wanted {
  std::size_t from = 0;
  Request request;
};

/// One chunk's parts on their way here.
class WeightParts::Read final : public IoTransfer::State {
 public:
  Read(WeightParts& parts, const Request& request, std::span<std::byte> buffer)
      : parts_(parts), request_(request), buffer_(buffer), from_(parts.messages_->size()) {}
  ~Read() override {
    const MutexLock lock(parts_.mutex_);
    parts_.reads_.erase(this);
  }
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;

  /// Asks all others. Takes the parts that it is a read of, whose mutex is held.
  void ask(const WeightParts& parts) CASTOR_REQUIRES(parts.mutex_) {
    for (std::size_t rank = 0; rank < from_.size(); ++rank) {
      if (rank == parts.messages_->rank()) {
        continue;
      }
      if (parts.gone_[rank]) {
        fail(rank, none_heard(parts) ? "a rank has ended, and none is heard any more"
                                     : "it has let go of the model");
        return;
      }
      try {
        from_[rank].answer = parts.messages_->receive(rank, request_.tag, part_of(rank));
        from_[rank].request =
            parts.messages_->send(rank, kRequests, std::as_bytes(std::span(&request_, 1)));
      } catch (const Error& error) {
        fail(rank, error.what());
        return;
      }
    }
  }
  /// The rank will not answer.
  void stop(std::size_t rank) noexcept {
    for (const auto* const message : {&from_[rank].request, &from_[rank].answer}) {
      if (*message) {
        (*message)->stop();
      }
    }
  }

  void wait() override {
    std::exception_ptr first = failure_;
    if (!first) {
      try {
        parts_.await_own(request_.chunk, request_.version);
        const auto own = parts_.parts_[request_.chunk];
        std::memcpy(part_of(parts_.messages_->rank()).data(), own.data(), own.size());
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
                      : std::make_exception_ptr(parts_.gone(request_.chunk, rank, error.what()));
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
    std::unique_ptr<RankMessage> answer;
  };

  [[nodiscard]] std::span<std::byte> part_of(std::size_t rank) const {
    const std::size_t bytes = buffer_.size() / from_.size();
    return buffer_.subspan(rank * bytes, bytes);
  }
  // Of two or more others: whichever it was, this one may not be to blame.
  [[nodiscard]] static bool none_heard(const WeightParts& parts) CASTOR_REQUIRES(parts.mutex_) {
    const auto num_gone = std::count(parts.gone_.begin(), parts.gone_.end(), true);
    return num_gone > 1 && static_cast<std::size_t>(num_gone) + 1 == parts.messages_->size();
  }
  // Those who have not been asked do not answer.
  void fail(std::size_t rank, const std::string& why) {
    failure_ = std::make_exception_ptr(parts_.gone(request_.chunk, rank, why));
    stop(rank);
  }
  void end(std::size_t rank) {
    if (from_[rank].request) {
      from_[rank].request->wait();
    }
    if (from_[rank].answer) {
      from_[rank].answer->wait();
    }
  }

  WeightParts& parts_;
  const Request request_;
  const std::span<std::byte> buffer_;
  std::vector<From> from_;  // per rank
  std::exception_ptr failure_;
};

WeightParts::WeightParts(std::shared_ptr<RankMessages> messages,
                         std::vector<std::span<std::byte>> parts, std::size_t num_weights,
                         std::chrono::milliseconds patience)
    : messages_(std::move(messages)),
      parts_(std::move(parts)),
      num_weights_(num_weights),
      patience_(patience),
      begun_(parts_.size(), 0),
      finished_(parts_.size(), 0),
      done_(messages_->size(), false),
      gone_(messages_->size(), false),
      dones_(messages_->size()),
      goodbyes_(messages_->size()) {
  listener_ = std::thread([this] { listen(); });
  answerer_ = std::thread([this] { answer(); });
}

WeightParts::~WeightParts() {
  end_reads();
  await_others();
  leave();
  answerer_.join();  // it says goodbye; until the others know, theirs have to be heard
  messages_->stop();
  listener_.join();
}

Error WeightParts::gone(std::size_t chunk, std::size_t rank, const std::string& why) const {
  const bool weights = chunk < num_weights_;
  return Error("rank " + std::to_string(messages_->rank()) + " of " +
               std::to_string(messages_->size()) + " lost the part of the " +
               (weights ? "weights" : "gradients") + " that rank " + std::to_string(rank) +
               " keeps (zero_stage=" + (weights ? "3" : "2 or 3") + "): " + why +
               ". A rank that failed says why in its own output; start all again, from the last "
               "checkpoint. One that ends while others still read is waited for with "
               "torch.distributed.barrier()");
}

void WeightParts::begin_update(ChunkId chunk) {
  const MutexLock lock(mutex_);
  ++begun_[index(chunk)];
}

void WeightParts::end_update(ChunkId chunk) {
  {
    const MutexLock lock(mutex_);
    ++finished_[index(chunk)];
  }
  changed_.notify_all();
}

IoTransfer WeightParts::start_read(std::size_t number, std::span<std::byte> buffer) {
  const MutexLock lock(mutex_);
  next_tag_ = next_tag_ % kMostTags + 1;
  bytes_read_ += buffer.size() - parts_[number].size();
  auto read = std::make_shared<Read>(
      *this, Request{.tag = next_tag_, .chunk = number, .version = begun_[number]}, buffer);
  read->ask(*this);
  reads_.insert(read.get());
  return IoTransfer(std::move(read));
}

void WeightParts::await_own(std::size_t chunk, std::uint64_t version) {
  MutexLock lock(mutex_);
  changed_.wait(lock.native(),
                [&]() CASTOR_REQUIRES(mutex_) { return left_ || finished_[chunk] >= version; });
  if (finished_[chunk] < version) {
    throw gone(chunk, messages_->rank(), "its own run could not go on");
  }
}

void WeightParts::listen() noexcept {
  try {
    Request request;
    while (const auto from =
               messages_->receive_any(kRequests, std::as_writable_bytes(std::span(&request, 1)))) {
      take(*from, request);
    }
  } catch (const std::exception&) {
    // A rank is gone, and now none is heard any more, here or elsewhere: who waits for one is told.
    for (std::size_t rank = 0; rank < messages_->size(); ++rank) {
      if (rank != messages_->rank()) {
        take(rank, {.kind = Request::Kind::kGoodbye});
      }
    }
    leave();
  }
}

void WeightParts::take(std::size_t from, const Request& request) {
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
    }
  }
  changed_.notify_all();
}

// Waits for a request whose version is there; false: this rank has left.
bool WeightParts::next_answer(Wanted& wanted) {
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

void WeightParts::answer() noexcept {
  Wanted wanted;
  while (next_answer(wanted)) {
    const std::span<const std::byte> part = parts_[wanted.request.chunk];
    try {
      bytes_sent_ += part.size();  // before that rank has it, and may meet this one and report
      messages_->send(wanted.from, wanted.request.tag, part)->wait();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): that rank is gone, or was told
    }
  }
  say_goodbye();
}

// What ranks tell each other at the end.
struct WeightParts::Farewell {
  static constexpr Request kDone{.kind = Request::Kind::kDone};
  static constexpr Request kGoodbye{.kind = Request::Kind::kGoodbye};
};

void WeightParts::end_reads() {
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
void WeightParts::await_others() {
  MutexLock lock(mutex_);
  changed_.wait_for(lock.native(), patience_, [this]() CASTOR_REQUIRES(mutex_) {
    return left_ || std::find(done_.begin(), done_.end(), false) == done_.end();
  });
}

// Those who have been answered have their answers: nobody waits for what will not come. A rank
// listens until all others know that it is gone, or are gone themselves.
void WeightParts::say_goodbye() noexcept {
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

void WeightParts::leave() noexcept {
  {
    const MutexLock lock(mutex_);
    left_ = true;
  }
  changed_.notify_all();
}

}  // namespace castor
