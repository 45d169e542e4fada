#include "ranks/shared_collectives.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "host/shared_mapping.h"
#include "io/unique_fd.h"
#include "ranks/shared_file.h"

namespace castor {
namespace {

/// Of each rank, so much is on its way at once. Two such buffers stay in a core's cache.
constexpr std::size_t kBufferBytes = std::size_t{512} << 10;
constexpr std::size_t kNumBuffers = 2;
constexpr int kYields = 500;
constexpr std::chrono::milliseconds kTick{200};
/// Ticks, not time: while all are stopped together none passes.
constexpr int kTicksToStopped = 50;
constexpr std::size_t kMaxRanks = 512;
constexpr std::size_t kMostNamed = 4;
constexpr std::size_t kReasonBytes = 1024;

enum class Reason : std::uint32_t { kNone, kBeingWritten, kThere };

/// At the beginning of the memory; the ranks' buffers follow.
struct Header {
  std::atomic<std::uint32_t> arrived;
  alignas(64) std::atomic<std::uint32_t> round;
  alignas(64) std::array<std::atomic<std::uint32_t>, kMaxRanks> met;  ///< rounds
  alignas(64) std::array<std::atomic<bool>, kMaxRanks> left;
  /// Why the first rank left that did so because another one was lost, one of another machine say.
  std::atomic<Reason> reason;
  std::array<char, kReasonBytes> reason_text;  ///< ends with 0
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<Reason>::is_always_lock_free);
constexpr std::size_t kHeaderBytes = 4096;
static_assert(sizeof(Header) <= kHeaderBytes);

struct Peer {
  int process = 0;
  UniqueFd ended;  ///< readable when it has
};

class MemoryRanks final : public Collectives {
 public:
  /// `rank`: among all, of which those from `first` on are this machine's.
  MemoryRanks(std::size_t rank, std::size_t first, SharedMapping memory, std::vector<Peer> peers,
              RankPatience patience)
      : rank_(rank - first),
        size_(peers.size()),
        first_(first),
        memory_(std::move(memory)),
        peers_(std::move(peers)),
        place_(std::move(patience.place)),
        timeout_(patience.timeout) {}
  ~MemoryRanks() override { leave(); }
  MemoryRanks(const MemoryRanks&) = delete;
  MemoryRanks& operator=(const MemoryRanks&) = delete;

  [[nodiscard]] std::size_t rank() const noexcept override { return rank_; }
  [[nodiscard]] std::size_t size() const noexcept override { return size_; }
  [[nodiscard]] std::string name() const override { return place_->name(); }
  [[nodiscard]] std::string name_of(std::size_t rank) const override {
    return place_->name_of(first_ + rank) + " (process " + std::to_string(peers_[rank].process) +
           ")";
  }
  [[nodiscard]] std::string description() const override {
    return "memory that the ranks of this machine share";
  }
  [[nodiscard]] Collectives* node() noexcept override { return this; }
  // A process's sockets close, by which others hear of it, a moment before it has ended.
  [[nodiscard]] std::string ended() const override {
    std::vector<pollfd> all;
    for (const Peer& peer : peers_) {
      all.push_back({.fd = peer.ended.get(), .events = POLLIN, .revents = 0});
    }
    ::poll(all.data(), all.size(), static_cast<int>(kTick.count()));
    const auto found =
        std::ranges::find_if(all, [](const pollfd& one) { return one.revents != 0; });
    return found == all.end()
               ? ""
               : has_ended(static_cast<std::size_t>(std::distance(all.begin(), found)));
  }

  [[nodiscard]] LostRank find_lost() const override {
    LostRank stopped_rank;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      if (has_exited(rank)) {
        return {.why = has_ended(rank)};
      }
      if (rank != rank_ && header().left[rank]) {
        return {.why = has_left(rank)};
      }
      if (stopped_rank.why.empty() && stopped(peers_[rank].process)) {
        stopped_rank = {.why = is_stopped(rank), .may_return = true};
      }
    }
    return stopped_rank;
  }

  void all_gather(std::span<const std::byte> own, std::span<std::byte> all) override {
    for (std::size_t begin = 0; begin < own.size(); begin += kBufferBytes) {
      const std::size_t bytes = std::min(kBufferBytes, own.size() - begin);
      std::memcpy(buffer(rank_), own.data() + begin, bytes);
      barrier();
      for (std::size_t rank = 0; rank < size_; ++rank) {
        std::byte* const target = all.data() + rank * own.size() + begin;
        if (target != own.data() + begin) {
          std::memcpy(target, buffer(rank), bytes);
        }
      }
      next_buffer();
    }
  }

  void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) override {
    const std::size_t part = sent.size() / size_;
    const std::size_t slice = kBufferBytes / size_;
    for (std::size_t begin = 0; begin < part; begin += slice) {
      const std::size_t bytes = std::min(slice, part - begin);
      for (std::size_t rank = 0; rank < size_; ++rank) {
        std::memcpy(buffer(rank_) + rank * slice, sent.data() + rank * part + begin, bytes);
      }
      barrier();
      for (std::size_t rank = 0; rank < size_; ++rank) {
        std::memcpy(received.data() + rank * part + begin, buffer(rank) + rank_ * slice, bytes);
      }
      next_buffer();
    }
  }

  void ring_shift(std::span<const std::byte> sent, std::span<std::byte> received) override {
    const std::size_t before = (rank_ + size_ - 1) % size_;
    for (std::size_t begin = 0; begin < sent.size(); begin += kBufferBytes) {
      const std::size_t bytes = std::min(kBufferBytes, sent.size() - begin);
      std::memcpy(buffer(rank_), sent.data() + begin, bytes);
      barrier();
      std::memcpy(received.data() + begin, buffer(before), bytes);
      next_buffer();
    }
  }

  void set_place(std::string place) override { place_->set(std::move(place)); }

  void leave() noexcept final {
    write_reason();
    header().left[rank_] = true;
    wake_all();
  }

 private:
  [[nodiscard]] Header& header() const noexcept {
    return *reinterpret_cast<Header*>(memory_.data());
  }
  [[nodiscard]] std::byte* buffer(std::size_t rank) const noexcept {
    return memory_.data() + kHeaderBytes + (rank * kNumBuffers + buffer_) * kBufferBytes;
  }
  // A rank writes a buffer again behind a barrier that all ranks reached which had read it.
  void next_buffer() noexcept { buffer_ = (buffer_ + 1) % kNumBuffers; }

  /// Returns when every rank is here.
  void barrier() {
    if (!lost_.empty()) {
      throw Error(lost_);
    }
    check_here();
    arrive();
    place_->met();
  }

  void arrive() {
    const std::uint32_t round = header().round.load(std::memory_order_acquire);
    header().met[rank_].store(round + 1, std::memory_order_relaxed);
    if (header().arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      header().arrived.store(0, std::memory_order_relaxed);
      header().round.store(round + 1, std::memory_order_release);
      wake_all();
      return;
    }
    const auto waiting = [&] { return header().round.load(std::memory_order_acquire) == round; };
    for (int i = 0; i < kYields && waiting(); ++i) {
      std::this_thread::yield();
    }
    if (!waiting()) {
      return;
    }
    const RankWaits::Wait wait = place_->wait([this, round] { return missing(round); });
    const timespec tick{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(kTick).count()};
    for (int ticks = 0; waiting();) {
      const long result =
          ::syscall(SYS_futex, &header().round, FUTEX_WAIT, round, &tick, nullptr, 0);
      if (result != 0 && errno == ETIMEDOUT) {
        ++ticks;
      }
      if (!waiting()) {
        return;
      }
      const std::string loss = find_loss(round, ticks);
      if (!waiting()) {
        return;  // they came, and one has gone on or let go since
      }
      check_here();
      if (!loss.empty()) {
        lost_ = lost_ranks(*this, loss).what();
        throw Error(lost_);
      }
    }
  }

  void check_here() const {
    if (header().left[rank_]) {
      throw lost_ranks(*this, "it has let go of the model itself");
    }
  }

  /// Says why this rank leaves, if another one is lost.
  void write_reason() noexcept {
    const std::string why = place_->find_lost().why;
    Reason none = Reason::kNone;
    if (!why.empty() && header().reason.compare_exchange_strong(none, Reason::kBeingWritten)) {
      why.copy(header().reason_text.data(), kReasonBytes - 1);
      header().reason = Reason::kThere;
    }
  }

  void wake_all() noexcept {
    ::syscall(SYS_futex, &header().round, FUTEX_WAKE, static_cast<int>(size_), nullptr, nullptr, 0);
  }

  [[nodiscard]] bool here(std::size_t rank, std::uint32_t round) const {
    return header().met[rank].load(std::memory_order_relaxed) == round + 1;
  }
  [[nodiscard]] bool has_exited(std::size_t rank) const {
    pollfd ended{.fd = peers_[rank].ended.get(), .events = POLLIN, .revents = 0};
    return ::poll(&ended, 1, 0) > 0;
  }
  [[nodiscard]] std::string has_ended(std::size_t rank) const {
    return name_of(rank) + " has ended" + place_->last_of(first_ + rank);
  }
  [[nodiscard]] std::string has_left(std::size_t rank) const {
    const std::string why =
        header().reason == Reason::kThere ? header().reason_text.data() : place_->find_lost().why;
    const bool of_another = !why.empty() && !why.starts_with(name_of(rank));
    return name_of(rank) + " has let go of the model" + (of_another ? ", as " + why : "");
  }
  [[nodiscard]] std::string is_stopped(std::size_t rank) const {
    return name_of(rank) + " is stopped" + place_->last_of(first_ + rank);
  }

  /// Those that are not here.
  [[nodiscard]] std::string missing(std::uint32_t round) const {
    std::string names;
    std::size_t more = 0;
    for (std::size_t rank = 0, named = 0; rank < peers_.size(); ++rank) {
      if (here(rank, round)) {
        continue;
      }
      if (named == kMostNamed) {
        ++more;
        continue;
      }
      names += (named++ == 0 ? "" : ", ") + name_of(rank);
    }
    return more == 0 ? names : names + " and " + std::to_string(more) + " more";
  }

  /// "" while all that are not here can still come.
  [[nodiscard]] std::string find_loss(std::uint32_t round, int ticks) const {
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      if (here(rank, round)) {
        continue;
      }
      if (has_exited(rank)) {
        return has_ended(rank);
      }
      if (header().left[rank]) {
        return has_left(rank);
      }
      if (ticks >= kTicksToStopped && stopped(peers_[rank].process)) {
        return is_stopped(rank);
      }
      if (ticks * kTick >= timeout_) {
        return name_of(rank) + " has not come for " +
               std::to_string(std::chrono::ceil<std::chrono::seconds>(timeout_).count()) +
               " s, the timeout of torch.distributed's process group";
      }
    }
    return "";
  }

  [[nodiscard]] static bool stopped(int process) {
    std::ifstream file("/proc/" + std::to_string(process) + "/stat");
    std::string stat;
    std::getline(file, stat);
    const std::size_t name_end = stat.rfind(") ");
    return name_end != std::string::npos && stat.compare(name_end + 2, 1, "T") == 0;
  }

  const std::size_t rank_;
  const std::size_t size_;
  const std::size_t first_;  // for messages
  const SharedMapping memory_;
  const std::vector<Peer> peers_;
  const std::shared_ptr<RankPlace> place_;
  const std::chrono::milliseconds timeout_;
  std::size_t buffer_ = 0;
  std::string lost_;
};

}  // namespace

SharedCollectives share_memory(Collectives& group, std::size_t node, RankPatience patience) {
  const std::size_t bytes = kHeaderBytes + node * kNumBuffers * kBufferBytes;
  std::string refusal;
  if (node > kMaxRanks) {
    refusal = "there are more than " + std::to_string(kMaxRanks) + " ranks on a machine";
    return {.ranks = nullptr, .refusal = refusal};
  }
  SharedFile shared = share_file(group, node, bytes);
  if (!shared.refusal.empty()) {
    return {.ranks = nullptr, .refusal = std::move(shared.refusal)};
  }
  SharedMapping memory(shared.file.get(), bytes);
  if (memory.data() == nullptr) {
    refusal = "mapping shared memory failed: " + std::generic_category().message(errno);
  }
  std::vector<Peer> peers;
  for (const int process : shared.processes) {
    UniqueFd ended(static_cast<int>(::syscall(SYS_pidfd_open, process, 0)));
    if (!ended) {
      refusal = "pidfd_open failed: " + std::generic_category().message(errno);
    }
    peers.push_back({.process = process, .ended = std::move(ended)});
  }
  refusal = any_refusal(group, refusal);
  if (!refusal.empty()) {
    return {.ranks = nullptr, .refusal = std::move(refusal)};
  }
  const std::size_t first = group.rank() / node * node;
  if (!patience.place) {
    patience.place =
        std::make_shared<RankPlace>(std::make_shared<RankWaits>(), group.rank(), group.size());
  }
  return {.ranks = std::make_shared<MemoryRanks>(group.rank(), first, std::move(memory),
                                                 std::move(peers), std::move(patience)),
          .refusal = ""};
}

}  // namespace castor
