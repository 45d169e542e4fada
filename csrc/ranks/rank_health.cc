#include "ranks/rank_health.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace castor {
namespace {

constexpr std::string_view kNobody = "-";
/// Heartbeats after which a rank whose connection has failed would have said why.
constexpr std::uint64_t kRoundsToExplain = 3;

template <typename Number>
Number number_of(std::string_view text) {
  Number number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

std::string in_one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

}  // namespace

RankHealth::RankHealth(std::size_t rank, std::size_t size, std::string host, int process,
                       std::chrono::milliseconds interval, std::chrono::milliseconds silence)
    : rank_(rank),
      size_(size),
      process_(process),
      interval_(interval),
      silence_(silence),
      heard_(size) {
  // A rank that starts again on the same store is told apart from its past.
  own_.beat = static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch() /
                                         std::chrono::nanoseconds(1));
  own_.host = in_one_line(std::move(host));
  own_.process = process;
}

void RankHealth::enter(std::string_view pass, std::string_view module) {
  const MutexLock lock(mutex_);
  pass_ = pass;
  module_ = module;
  place_.clear();
}

void RankHealth::set_place(const std::string& place) {
  const MutexLock lock(mutex_);
  place_ = place;
}

std::string RankHealth::own_phase() const {
  std::string phase;
  if (!pass_.empty()) {
    phase =
        "in the " + pass_ + " of " + (module_.empty() ? "the model" : "module '" + module_ + "'");
  }
  if (!place_.empty()) {
    phase += (phase.empty() ? "where it " : ", where it ") + place_;
  }
  return in_one_line(std::move(phase));
}

std::string RankHealth::beat() {
  const MutexLock lock(mutex_);
  due_ = false;
  return std::to_string(++own_.beat) + "\n" + (own_.ended ? "1" : "0") + "\n" +
         std::to_string(own_.process) + "\n" +
         (own_.blamed ? std::to_string(*own_.blamed) : std::string(kNobody)) + "\n" + own_.host +
         "\n" + own_phase();
}

RankHealth::Record RankHealth::parse(std::string_view text) {
  std::array<std::string_view, 6> lines;
  for (std::string_view& line : lines) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  Record record;
  record.beat = number_of<std::uint64_t>(lines[0]);
  record.ended = lines[1] == "1";
  record.process = number_of<int>(lines[2]);
  if (lines[3] != kNobody) {
    record.blamed = number_of<std::size_t>(lines[3]);
  }
  record.host = lines[4];
  record.phase = lines[5];
  return record;
}

void RankHealth::hear(std::size_t rank, std::string_view record) {
  Record parsed = parse(record);
  const MutexLock lock(mutex_);
  std::optional<Heard>& heard = heard_[rank];
  if (!heard) {
    heard.emplace().record = std::move(parsed);
  } else if (heard->record.beat != parsed.beat) {
    *heard = {.record = std::move(parsed), .alive = true, .silence = {}};
  }
}

void RankHealth::end_round() {
  const MutexLock lock(mutex_);
  ++rounds_;
  since_round_ = {};
  changed_.notify_all();
}

void RankHealth::end_records() {
  const MutexLock lock(mutex_);
  over_ = true;
  changed_.notify_all();
}

bool RankHealth::await_beat() {
  MutexLock lock(mutex_);
  changed_.wait_for(lock.native(), interval_, [&]() CASTOR_REQUIRES(mutex_) { return due_; });
  return !own_.ended;
}

void RankHealth::look(std::chrono::milliseconds passed) {
  const MutexLock lock(mutex_);
  since_round_ += rounds_ == rounds_at_look_ ? passed : std::chrono::milliseconds{};
  rounds_at_look_ = rounds_;
  for (std::optional<Heard>& heard : heard_) {
    if (heard) {
      heard->silence += passed;
    }
  }
}

void RankHealth::end() {
  const MutexLock lock(mutex_);
  own_.ended = due_ = true;
  changed_.notify_all();
}

std::string RankHealth::name_of(std::size_t rank) const {
  const std::optional<Heard>& heard = heard_[rank];
  return "rank " + std::to_string(rank) +
         (heard ? " (process " + std::to_string(heard->record.process) + ")" : "");
}

std::string RankHealth::rest_of(std::size_t rank) const {
  if (!heard_[rank]) {
    return "";
  }
  const Record& record = heard_[rank]->record;
  return ", on host " + record.host + (record.phase.empty() ? "" : ", last heard " + record.phase);
}

std::string RankHealth::last_of(std::size_t rank) const {
  const MutexLock lock(mutex_);
  return rest_of(rank);
}

std::optional<std::size_t> RankHealth::silent() const {
  for (std::size_t rank = 0; rank < size_; ++rank) {
    const std::optional<Heard>& heard = heard_[rank];
    if (heard && heard->alive && !heard->record.ended && heard->silence >= silence_) {
      return rank;
    }
  }
  return std::nullopt;
}

std::optional<std::size_t> RankHealth::blamed() const {
  for (const std::optional<Heard>& heard : heard_) {
    if (heard && heard->alive && heard->record.blamed && *heard->record.blamed < size_) {
      return heard->record.blamed;
    }
  }
  return std::nullopt;
}

bool RankHealth::store_is_silent(std::chrono::milliseconds since) const {
  return !over_ && since_round_ >= since && size_ > 1;
}

void RankHealth::blame(std::size_t rank) {
  if (!own_.blamed) {
    own_.blamed = rank;
    due_ = true;
    changed_.notify_all();
  }
}

LostRank RankHealth::find_lost() const {
  const MutexLock lock(mutex_);
  if (own_.blamed) {  // a connection that has failed does not come back
    return {.why = name_of(*own_.blamed) + " has ended or is stopped" + rest_of(*own_.blamed)};
  }
  const std::string silence =
      " for " + std::to_string(std::chrono::ceil<std::chrono::seconds>(silence_).count()) + " s";
  if (store_is_silent(silence_)) {
    return {.why = name_of(0) +
                   ", which keeps torch.distributed's store itself or by its launcher, has not "
                   "answered" +
                   silence + rest_of(0)};
  }
  // While the store is silent all ranks are.
  if (over_ || store_is_silent(std::max(2 * interval_, silence_ / 4))) {
    return {};
  }
  const std::optional<std::size_t> found = silent();
  return found ? LostRank{.why = name_of(*found) + " has not been heard" + silence +
                                 ": it has ended or is stopped, or its machine is gone" +
                                 rest_of(*found)}
               : LostRank{};
}

std::string RankHealth::explain(std::size_t rank, const std::string& error) {
  MutexLock lock(mutex_);
  const std::vector<std::optional<Heard>> before = heard_;
  const std::uint64_t enough = rounds_ + kRoundsToExplain;
  const std::chrono::milliseconds longest = interval_ * (kRoundsToExplain + 1);
  changed_.wait_for(lock.native(), longest, [&]() CASTOR_REQUIRES(mutex_) {
    return over_ || rounds_ >= enough || blamed().has_value();
  });
  const auto stands = [&](std::size_t other) CASTOR_REQUIRES(mutex_) {
    return before[other] && !heard_[other]->record.ended &&
           heard_[other]->record.beat == before[other]->record.beat;
  };
  std::size_t lost = rank;
  if (const std::optional<std::size_t> other = blamed()) {
    lost = *other;
  } else if (!over_ && !stands(rank)) {
    for (std::size_t one = 0; one < size_; ++one) {
      lost = one != rank_ && stands(one) ? one : lost;
    }
  }
  if (lost == rank_) {
    lost = rank;  // another rank has lost this one
  }
  const bool ended =
      lost != rank || over_ || stands(lost) || (heard_[lost] && heard_[lost]->record.ended);
  if (ended) {
    blame(lost);
  }
  return name_of(lost) + (ended ? " has ended or is stopped" : " cannot be reached") + " (" +
         error + ")" + rest_of(lost);
}

}  // namespace castor
