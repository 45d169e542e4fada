#include "core/inference_plan.h"

#include <algorithm>
#include <optional>
#include <span>

#include "core/trace.h"

namespace castor {
namespace {

// Index i of n in the order of i's bits reversed: however many are taken from the front, they are
// spread evenly over all (van der Corput 1935).
std::uint32_t spread_key(std::uint32_t i) {
  std::uint32_t reversed = 0;
  for (int bit = 0; bit < 32; ++bit) {
    reversed = (reversed << 1) | ((i >> bit) & 1);
  }
  return reversed;
}

bool contains(std::span<const ChunkId> chunks, ChunkId chunk) {
  return std::find(chunks.begin(), chunks.end(), chunk) != chunks.end();
}

}  // namespace

InferencePlan::InferencePlan(const ChunkLayout& layout)
    : layout_(layout), stays_(layout.chunks().size(), false) {
  for (std::size_t i = 0; i < layout.modules().size(); ++i) {
    std::vector<ChunkId>& pinned = pinned_.emplace_back();
    std::optional<ModuleId> module = ModuleId{static_cast<std::uint32_t>(i)};
    for (; module; module = layout.module(*module).parent) {
      for (const ChunkId chunk : layout.chunks_of(*module)) {
        if (!contains(pinned, chunk)) {
          pinned.push_back(chunk);
        }
      }
    }
  }
}

bool InferencePlan::begin_pass(ModuleId module) {
  const auto again = std::find_if(passes_.begin(), passes_.end(), [module](const PassStart& pass) {
    return pass.module == module;
  });
  const bool round_over = again != passes_.end();
  if (round_over) {
    planned_peak_ = std::exchange(recorded_peak_, 0);
    adopt(std::span(recorded_).subspan(again->first_access));
    recorded_.clear();
    passes_.clear();
  }
  passes_.push_back({.module = module, .first_access = recorded_.size()});
  return round_over && followed_;
}

void InferencePlan::adopt(std::span<const ModuleId> round) {
  first_access_ += round_.size();
  num_entered_ = 0;
  look_again();
  followed_ = round.size() < Tracer::kMaxEvents;  // else it was not recorded to its end
  if (followed_ && !std::equal(round.begin(), round.end(), round_.begin(), round_.end())) {
    round_.assign(round.begin(), round.end());
    find_next_uses();
    chosen_ = false;
  }
}

bool InferencePlan::enter(ModuleId module) {
  if (recorded_.size() < Tracer::kMaxEvents) {
    recorded_.push_back(module);
  }
  if (!followed_) {
    return false;
  }
  followed_ = num_entered_ < round_.size() && round_[num_entered_] == module;
  ++num_entered_;
  return !followed_;
}

void InferencePlan::note_nonmodel(std::size_t bytes) noexcept {
  recorded_peak_ = std::max(recorded_peak_, bytes);
}

std::size_t InferencePlan::nonmodel_peak() const noexcept {
  return std::max(planned_peak_, recorded_peak_);
}

void InferencePlan::find_next_uses() {
  const std::size_t n = round_.size();
  first_next_use_.resize(n);
  std::size_t total = 0;
  for (std::size_t i = 0; i < n; ++i) {
    first_next_use_[i] = total;
    total += layout_.chunks_of(round_[i]).size();
  }
  next_uses_.resize(total);
  std::vector<std::uint64_t> next(layout_.chunks().size(), kNeverUsed);
  for (std::size_t i = 2 * n; i-- > 0;) {  // the round after it first
    const auto& chunks = layout_.chunks_of(round_[i % n]);
    for (std::size_t k = 0; k < chunks.size(); ++k) {
      std::uint64_t& use = next[index(chunks[k])];
      if (i < n) {
        next_uses_[first_next_use_[i] + k] = use;
      }
      use = i;
    }
  }
}

std::uint64_t InferencePlan::rank(std::size_t i) const {
  const std::size_t use = first_next_use_[num_entered_ - 1] + i;
  const ChunkId chunk = layout_.chunks_of(round_[num_entered_ - 1])[i];
  return ranked(chunk, first_access_ + next_uses_[use], soon_[use]);
}

std::vector<std::uint64_t> InferencePlan::ranks(const std::vector<bool>& fetched_ahead) const {
  std::vector<std::uint64_t> ranks(layout_.chunks().size(), kNeverUsed);
  const std::uint64_t next = first_access_ + num_entered_;
  std::size_t streamed = 0;
  for (std::uint64_t i = next; i < next + round_.size(); ++i) {
    for (const ChunkId chunk : layout_.chunks_of(module_at(i))) {
      if (ranks[index(chunk)] == kNeverUsed) {
        const bool soon = !stays(chunk) && streamed++ <= max_prefetch_;
        ranks[index(chunk)] = ranked(chunk, i, soon || fetched_ahead[index(chunk)]);
      }
    }
  }
  return ranks;
}

bool InferencePlan::make_room_for(const Residency& residency, const InferenceRoom& room) {
  const bool fits = chosen_ && room.cap_bytes >= needed_bytes_;
  const bool chooses = !fits || (room.cap_bytes > chosen_for_bytes_ &&
                                 room.cap_bytes - needed_bytes_ >= smallest_streamed_);
  if (chooses) {
    choose(residency, room);
  }
  cap_bytes_ = room.policy == PlacementPolicy::kCpu ? std::min(room.cap_bytes, needed_bytes_)
                                                    : room.cap_bytes;
  return chooses;
}

// Chunks that stay take no part in the traffic: as many bytes stay as leave room to stream the
// others, the next ones beside those in use.
void InferencePlan::choose(const Residency& residency, const InferenceRoom& room) {
  constexpr std::size_t kMostRefused = 8;  // in a row
  chosen_ = true;
  chosen_for_bytes_ = room.cap_bytes;
  max_prefetch_ = room.max_prefetch;
  std::size_t staying = 0;
  for (std::size_t i = 0; i < stays_.size(); ++i) {
    const ChunkId chunk{static_cast<std::uint32_t>(i)};
    const Placement placement = residency.placement(chunk);
    stays_[i] = placement != Placement::kStream;
    staying += placement == Placement::kKeep ? residency.capacity(chunk) : 0;
  }
  std::size_t window = measure_window(residency);
  std::vector<ChunkId> chosen;
  std::size_t refused = 0;
  const std::vector<ChunkId> candidates =
      room.policy == PlacementPolicy::kCpu ? std::vector<ChunkId>() : by_preference(residency);
  for (const ChunkId chunk : candidates) {
    const std::size_t with_it = staying + residency.capacity(chunk);
    stays_[index(chunk)] = true;
    if (with_it + window > room.cap_bytes) {
      const std::size_t without_it = measure_window(residency);
      if (with_it + without_it > room.cap_bytes) {
        stays_[index(chunk)] = false;
        if (++refused == kMostRefused) {
          break;
        }
        continue;
      }
      window = without_it;
    }
    refused = 0;
    staying = with_it;
    chosen.push_back(chunk);
  }
  window = measure_window(residency);
  while (!chosen.empty() && staying + window > room.cap_bytes) {
    stays_[index(chosen.back())] = false;
    staying -= residency.capacity(chosen.back());
    chosen.pop_back();
    window = measure_window(residency);
  }
  needed_bytes_ = staying + window;
  smallest_streamed_ = ~std::size_t{0};
  for (const ChunkId chunk : candidates) {
    if (!stays(chunk)) {
      smallest_streamed_ = std::min(smallest_streamed_, residency.capacity(chunk));
    }
  }
}

// Large ones first, whose room to stream would be large too; equal ones so that those which stay
// are spread over the round, and the link has the others to bring while they compute.
std::vector<ChunkId> InferencePlan::by_preference(const Residency& residency) const {
  struct Candidate {
    ChunkId chunk;
    std::size_t bytes;
    std::uint32_t key;
  };
  std::vector<Candidate> candidates;
  std::vector<bool> seen(stays_.size(), false);
  for (const ModuleId module : round_) {
    for (const ChunkId chunk : layout_.chunks_of(module)) {
      if (!seen[index(chunk)] && !stays(chunk)) {
        candidates.push_back({.chunk = chunk, .bytes = residency.capacity(chunk), .key = 0});
      }
      seen[index(chunk)] = true;
    }
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    candidates[i].key = spread_key(static_cast<std::uint32_t>(i));
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.bytes != b.bytes ? a.bytes > b.bytes : a.key < b.key;
  });
  std::vector<ChunkId> chunks;
  for (const Candidate& candidate : candidates) {
    chunks.push_back(candidate.chunk);
  }
  return chunks;
}

// What chunks that stream take where they take the most: those that are pinned, and the next
// max_prefetch others. Notes which of those used are among the next.
std::size_t InferencePlan::measure_window(const Residency& residency) {
  const std::size_t n = round_.size();
  std::size_t widest = 1;
  for (const auto& pinned : pinned_) {
    widest = std::max(widest, pinned.size());
  }
  soon_.assign(next_uses_.size(), false);
  std::vector<ChunkId> ahead;  // the nearest last
  std::size_t most = 0;
  for (std::size_t i = 2 * n; i-- > 0;) {  // the round after it first
    const std::vector<ChunkId>& pinned = pinned_[index(round_[i % n])];
    const auto& used = layout_.chunks_of(round_[i % n]);
    if (i < n) {
      std::size_t bytes = 0;
      for (const ChunkId chunk : pinned) {
        bytes += !stays(chunk) ? residency.capacity(chunk) : 0;
      }
      std::size_t left = max_prefetch_;
      for (auto next = ahead.rbegin(); next != ahead.rend() && left > 0; ++next) {
        if (!contains(pinned, *next)) {
          bytes += residency.capacity(*next);
          --left;
        }
      }
      most = std::max(most, bytes);
      const std::span nearest = std::span(ahead).last(std::min(ahead.size(), max_prefetch_ + 1));
      for (std::size_t k = 0; k < used.size(); ++k) {
        soon_[first_next_use_[i] + k] = contains(nearest, used[k]);
      }
    }
    for (const ChunkId chunk : used) {
      if (!stays(chunk)) {
        std::erase(ahead, chunk);
        ahead.push_back(chunk);
      }
    }
    if (ahead.size() > max_prefetch_ + widest) {
      ahead.erase(ahead.begin(), ahead.end() - static_cast<std::ptrdiff_t>(max_prefetch_ + widest));
    }
  }
  return most;
}

}  // namespace castor
