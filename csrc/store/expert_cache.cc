#include "store/expert_cache.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace castor {

ExpertCache::Layer::Layer(const ExpertParts& parts, const ExpertLayer& of_model)
    : spec(of_model),
      chunks(spec.chunks(parts.layout)),
      expert_bytes(spec.expert_bytes()),
      place_of(static_cast<std::size_t>(spec.num_experts), kNone),
      copies(parts.copies, parts.compute, spec.params.size()),
      guess(parts.copies, parts.compute, spec.params.size()) {}

ExpertCache::ExpertCache(ExpertParts parts, const std::vector<ExpertLayer>& layers)
    : parts_(std::move(parts)), nonmodel_(parts_.nonmodel.peaks(), parts_.nonmodel.bytes()) {
  for (const ChunkSpec& chunk : parts_.layout.chunks()) {
    streamed_bytes_ += chunk.by_row || chunk.read_on_host ? 0 : chunk.capacity_bytes;
  }
  for (const ExpertLayer& of_model : layers) {
    const Layer& layer = layers_.emplace_back(parts_, of_model);
    layers_bytes_ += layer.expert_bytes * static_cast<std::size_t>(of_model.num_experts);
  }
}

// Shares of the room are as the layers' bytes.
std::size_t ExpertCache::places_for(const Layer& layer) const {
  const std::size_t budget = parts_.device.budget();
  const std::size_t taken =
      parts_.model.lasting_bytes() + streamed_bytes_ + std::max(peak_, previous_peak_);
  const double room = budget > taken ? static_cast<double>(budget - taken) : 0.0;
  const auto places = static_cast<std::size_t>(room / static_cast<double>(layers_bytes_) *
                                               static_cast<double>(layer.spec.num_experts));
  return std::min(places, static_cast<std::size_t>(layer.spec.num_experts));
}

// The cache has as many bytes as after the last call, or fewer: then this takes the activity for
// higher than it was.
void ExpertCache::note_activity(std::size_t layer) {
  const std::size_t highest = nonmodel_.take(parts_.nonmodel.bytes());
  const std::size_t own = figures().cache_bytes;
  if (layer <= last_layer_) {  // another pass
    previous_peak_ = std::exchange(peak_, 0);
  }
  last_layer_ = layer;
  peak_ = std::max(peak_, highest > own ? highest - own : 0);
}

std::optional<ExpertCache::Rows> ExpertCache::fetch(std::size_t layer,
                                                    std::span<const std::int64_t> experts) {
  Layer& own = layers_.at(layer);
  if (experts.empty() || !parts_.model.begin_rows(own.chunks)) {
    return std::nullopt;
  }
  note_activity(layer);
  forget_written(own);
  {
    const MutexLock lock(mutex_);
    own.in_use = true;
  }
  Rows rows;
  try {
    make_places(own, experts.size());
    const MutexLock lock(mutex_);
    bring(own, experts, rows);
  } catch (...) {
    release(layer);
    throw;
  }
  static_cast<void>(nonmodel_.take(parts_.nonmodel.bytes()));
  return rows;
}

// A chunk may hold parameters of several layers.
void ExpertCache::forget_written(const Layer& layer) {
  for (const ChunkId chunk : layer.chunks) {
    if (!parts_.model.take_written(chunk)) {
      continue;
    }
    const MutexLock lock(mutex_);
    for (Layer& other : layers_) {
      if (std::ranges::find(other.chunks, chunk) != other.chunks.end()) {
        forget(other);
      }
    }
  }
}

void ExpertCache::forget(Layer& layer) {
  std::ranges::fill(layer.expert_at, kNone);
  std::ranges::fill(layer.place_of, kNone);
  std::ranges::fill(layer.used, 0);
  layer.spare = kNone;
}

// Memory is taken without the mutex: whoever makes room for it asks other layers to give way.
void ExpertCache::make_places(Layer& layer, std::size_t num_needed) {
  const std::size_t share = places_for(layer);
  Memories dropped;
  std::size_t num_places = num_needed;
  {
    const MutexLock lock(mutex_);
    const std::size_t now = layer.expert_at.size();
    if (now >= num_needed && share <= now + std::max<std::size_t>(1, now / 4)) {
      return;
    }
    drop(layer, dropped);
  }
  dropped.clear();
  const std::size_t available = parts_.device.available();
  num_places = std::max(num_needed, std::min(share, available / layer.expert_bytes));
  Memories memory;
  for (const std::size_t row_bytes : layer.spec.row_bytes) {
    memory.push_back(parts_.take(row_bytes * num_places));
  }
  const MutexLock lock(mutex_);
  layer.memory = std::move(memory);
  layer.expert_at.assign(num_places, kNone);
  layer.used.assign(num_places, 0);
  layer.for_one_call = num_places > share;
  figures_.cache_bytes += num_places * layer.expert_bytes;
}

void ExpertCache::bring(Layer& layer, std::span<const std::int64_t> experts, Rows& rows) {
  ++num_calls_;
  std::vector<RowCopies::Row> missing;
  layer.guessed = false;
  for (const std::int64_t expert : experts) {
    const std::int64_t place = layer.place_of.at(static_cast<std::size_t>(expert));
    if (place == kNone) {
      continue;
    }
    layer.used[static_cast<std::size_t>(place)] = num_calls_;
    if (place == layer.spare) {
      ++figures_.right_guesses;
      layer.guessed = true;
      layer.spare = kNone;
    }
  }
  if (experts.size() == layer.used.size()) {
    layer.spare = kNone;  // the call needs all places
  } else if (layer.spare != kNone) {
    layer.used[static_cast<std::size_t>(layer.spare)] = num_calls_;  // no expert is to take it
  }
  for (const std::int64_t expert : experts) {
    std::int64_t& place = layer.place_of[static_cast<std::size_t>(expert)];
    if (place == kNone) {
      const auto oldest = std::ranges::min_element(layer.used);
      place = oldest - layer.used.begin();
      std::int64_t& there = layer.expert_at[static_cast<std::size_t>(place)];
      if (there != kNone) {
        layer.place_of[static_cast<std::size_t>(there)] = kNone;
      }
      there = expert;
      *oldest = num_calls_;
      missing.push_back({.from = expert, .to = place});
    }
    rows.places.push_back(place);
  }
  rows.num_places = layer.num_places();
  rows.params = layer.memory;
  figures_.hits += experts.size() - missing.size();
  figures_.misses += missing.size();
  figures_.fetched_bytes += missing.size() * layer.expert_bytes;
  begin(layer, layer.copies, missing);
  keep_spare(layer);
}

// The expert that was used least recently gives its place, now that this call's are known; none
// where there is room for all.
void ExpertCache::keep_spare(Layer& layer) {
  if (!layer.guesses || layer.spare != kNone || layer.num_places() == layer.spec.num_experts) {
    return;
  }
  const auto oldest = std::ranges::min_element(layer.used);
  if (*oldest == num_calls_) {
    return;  // the call needs all places
  }
  layer.spare = oldest - layer.used.begin();
  std::int64_t& there = layer.expert_at[static_cast<std::size_t>(layer.spare)];
  if (there != kNone) {
    layer.place_of[static_cast<std::size_t>(there)] = kNone;
    there = kNone;
  }
}

void ExpertCache::begin(Layer& layer, RowCopies& copies, std::span<const RowCopies::Row> rows) {
  for (std::size_t i = 0; i < layer.spec.params.size(); ++i) {
    copies.begin(i,
                 {.host = parts_.model.on_host(layer.spec.params[i]),
                  .device = layer.memory[i]->data(),
                  .row_bytes = layer.spec.row_bytes[i]},
                 rows);
  }
}

bool ExpertCache::takes_guesses(std::size_t layer) {
  const MutexLock lock(mutex_);
  Layer& own = layers_.at(layer);
  own.guesses = true;
  return own.spare != kNone;
}

void ExpertCache::guess(std::size_t layer, std::span<const std::int64_t> likely) {
  Layer& own = layers_.at(layer);
  if (!takes_guesses(layer) || !parts_.model.begin_rows(own.chunks)) {
    return;
  }
  forget_written(own);
  const MutexLock lock(mutex_);
  if (own.spare == kNone) {
    return;  // it has given way, or was forgotten
  }
  std::int64_t& there = own.expert_at[static_cast<std::size_t>(own.spare)];
  const auto expert = std::ranges::find_if(likely, [&](std::int64_t one) {
    return own.place_of.at(static_cast<std::size_t>(one)) == kNone;
  });
  if (expert == likely.end() || std::ranges::find(likely, there) != likely.end()) {
    return;
  }
  own.guess.wait();  // it was wrong, or failed
  if (there != kNone) {
    own.place_of[static_cast<std::size_t>(there)] = kNone;
  }
  there = *expert;
  own.place_of[static_cast<std::size_t>(there)] = own.spare;
  figures_.guessed_bytes += own.expert_bytes;
  const RowCopies::Row row{.from = there, .to = own.spare};
  begin(own, own.guess, std::span(&row, 1));
}

void ExpertCache::await(std::size_t layer, std::size_t param) {
  Layer& own = layers_.at(layer);
  try {
    if (own.guessed) {
      own.guess.await(param);
    }
    own.copies.await(param);
  } catch (...) {
    const MutexLock lock(mutex_);
    forget(own);
    throw;
  }
}

void ExpertCache::release(std::size_t layer) {
  Layer& own = layers_.at(layer);
  std::exception_ptr failure;
  for (std::size_t i = 0; i < own.spec.params.size(); ++i) {
    try {
      await(layer, i);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  Memories dropped;
  {
    const MutexLock lock(mutex_);
    own.in_use = false;
    if (own.for_one_call) {
      drop(own, dropped);
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void ExpertCache::drop(Layer& layer, Memories& dropped) {
  figures_.cache_bytes -= layer.expert_at.size() * layer.expert_bytes;
  dropped.insert(dropped.end(), layer.memory.begin(), layer.memory.end());
  layer.guess.wait();  // into memory that goes
  forget(layer);
  layer.memory.clear();
  layer.expert_at.clear();
  layer.used.clear();
  layer.for_one_call = false;
}

void ExpertCache::clear() noexcept {
  static_cast<void>(give_up(~std::size_t{0}));
  const MutexLock lock(mutex_);
  for (Layer& layer : layers_) {
    layer.guesses = false;
  }
}

bool ExpertCache::give_up(std::size_t bytes) noexcept {
  Memories dropped;
  const MutexLock lock(mutex_);
  for (std::size_t freed = 0; freed < bytes;) {
    Layer* largest = nullptr;
    for (Layer& layer : layers_) {
      if (!layer.in_use && !layer.memory.empty() &&
          (largest == nullptr || layer.num_places() > largest->num_places())) {
        largest = &layer;
      }
    }
    if (largest == nullptr) {
      break;
    }
    freed += largest->expert_at.size() * largest->expert_bytes;
    drop(*largest, dropped);
  }
  return !dropped.empty();
}

ExpertCache::Figures ExpertCache::figures() const {
  const MutexLock lock(mutex_);
  return figures_;
}

}  // namespace castor
