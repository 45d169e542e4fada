#include "torch/expert_cache.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "core/error.h"
#include "torch/chunk_storages.h"
#include "torch/torch_device.h"

namespace castor {

ExpertCache::ExpertCache(std::shared_ptr<Session> session, std::vector<std::vector<ParamId>> layers)
    : session_(std::move(session)),
      nonmodel_(session_->memory().nonmodel()->peaks(), session_->memory().nonmodel()->bytes()) {
  const ChunkLayout& layout = session_->layout();
  for (std::size_t i = 0; i < layout.chunks().size(); ++i) {
    const ChunkSpec& chunk = layout.chunks()[i];
    streamed_bytes_ += chunk.by_row || chunk.read_on_host ? 0 : chunk.capacity_bytes;
  }
  for (std::vector<ParamId>& params : layers) {
    Layer& layer = layers_.emplace_back();
    layer.params = std::move(params);
    for (const ParamId param : layer.params) {
      const at::Tensor& tensor = session_->parameter(param);
      const std::int64_t num_experts = tensor.dim() == 0 ? 0 : tensor.size(0);
      layer.num_experts = layer.row_bytes.empty() ? num_experts : layer.num_experts;
      if (num_experts != layer.num_experts || num_experts == 0 || !tensor.is_contiguous()) {
        throw InvalidArgument("parameter '" + layout.param(param).name + "' has " +
                              std::to_string(num_experts) + " experts in its first dimension, of " +
                              std::to_string(layer.num_experts) +
                              " in its layer; they have to be as many, and contiguous");
      }
      layer.row_bytes.push_back(tensor.nbytes() / static_cast<std::size_t>(num_experts));
      layer.expert_bytes += layer.row_bytes.back();
      const ChunkId chunk = layout.place(param).chunk;
      if (std::ranges::find(layer.chunks, chunk) == layer.chunks.end()) {
        layer.chunks.push_back(chunk);
      }
    }
    layer.place_of.assign(static_cast<std::size_t>(layer.num_experts), kNone);
    layer.tickets.resize(layer.params.size());
    layers_bytes_ += layer.expert_bytes * static_cast<std::size_t>(layer.num_experts);
  }
  session_->runtime().set_spare(this);
}

ExpertCache::~ExpertCache() { session_->runtime().set_spare(nullptr); }

// Shares of the room are as the layers' bytes.
std::size_t ExpertCache::places_for(const Layer& layer) const {
  const Runtime& runtime = session_->runtime();
  const std::size_t budget = session_->memory().device_tier()->ledger().budget();
  const std::size_t taken = runtime.lasting_bytes() + runtime.bytes_of_others() + streamed_bytes_ +
                            std::max(peak_, previous_peak_);
  const double room = budget > taken ? static_cast<double>(budget - taken) : 0.0;
  const auto places = static_cast<std::size_t>(room / static_cast<double>(layers_bytes_) *
                                               static_cast<double>(layer.num_experts));
  return std::min(places, static_cast<std::size_t>(layer.num_experts));
}

// The cache has as many bytes as after the last call, or fewer: then this takes the activity for
// higher than it was.
void ExpertCache::note_activity(std::size_t layer) {
  const std::size_t highest = nonmodel_.take(session_->memory().nonmodel()->bytes());
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
  if (experts.empty() || !session_->begin_rows(own.chunks)) {
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
  for (std::size_t i = 0; i < own.params.size(); ++i) {
    const at::Tensor& param = session_->parameter(own.params[i]);
    ParamGeometry geometry{at::DimVector(param.sizes()), at::DimVector(param.strides())};
    geometry.sizes[0] = own.num_places();
    rows.params.push_back(
        tensor_over(own.storages[i], param.scalar_type(), /*offset=*/0, geometry));
  }
  static_cast<void>(nonmodel_.take(session_->memory().nonmodel()->bytes()));
  return rows;
}

// A chunk may hold parameters of several layers.
void ExpertCache::forget_written(const Layer& layer) {
  for (const ChunkId chunk : layer.chunks) {
    if (!session_->take_written(chunk)) {
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
}

// Memory is taken without the mutex: whoever makes room for it asks other layers to give way.
void ExpertCache::make_places(Layer& layer, std::size_t num_needed) {
  const std::size_t share = places_for(layer);
  Dropped dropped;
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
  const std::size_t available = session_->memory().device_tier()->ledger().available();
  num_places = std::max(num_needed, std::min(share, available / layer.expert_bytes));
  const auto options = at::TensorOptions().dtype(at::kByte).device(session_->torch_device());
  std::vector<c10::Storage> storages;
  for (const std::size_t row_bytes : layer.row_bytes) {
    storages.push_back(
        at::empty({static_cast<std::int64_t>(row_bytes * num_places)}, options).storage());
  }
  const MutexLock lock(mutex_);
  layer.storages = std::move(storages);
  layer.expert_at.assign(num_places, kNone);
  layer.used.assign(num_places, 0);
  layer.for_one_call = num_places > share;
  figures_.cache_bytes += num_places * layer.expert_bytes;
}

void ExpertCache::bring(Layer& layer, std::span<const std::int64_t> experts, Rows& rows) {
  ++num_calls_;
  std::vector<std::pair<std::int64_t, std::int64_t>> missing;  // expert, place
  for (const std::int64_t expert : experts) {
    const std::int64_t place = layer.place_of.at(static_cast<std::size_t>(expert));
    if (place != kNone) {
      layer.used[static_cast<std::size_t>(place)] = num_calls_;
    }
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
      missing.emplace_back(expert, place);
    }
    rows.places.push_back(place);
  }
  rows.num_places = layer.num_places();
  figures_.hits += experts.size() - missing.size();
  figures_.misses += missing.size();
  figures_.fetched_bytes += missing.size() * layer.expert_bytes;
  // The parameters one after the other: forward computes with the first while others come.
  for (std::size_t i = 0; i < layer.params.size(); ++i) {
    const std::byte* const source =
        session_->updates().states().element(layer.params[i], PayloadKind::kParam);
    auto* const target = static_cast<std::byte*>(layer.storages[i].mutable_data());
    const std::size_t row_bytes = layer.row_bytes[i];
    for (const auto& [expert, place] : missing) {
      layer.tickets[i].push_back(session_->chunks().copies().submit(
          {.source = {source + static_cast<std::size_t>(expert) * row_bytes, row_bytes},
           .target = {target + static_cast<std::size_t>(place) * row_bytes, row_bytes},
           .direction = CopyDirection::kHostToDevice,
           .behind = session_->memory().device().current_stream(),
           .await_source = {}}));
    }
  }
}

void ExpertCache::await(std::size_t layer, std::size_t param) {
  Layer& own = layers_.at(layer);
  const std::vector<CopyTicket> tickets = std::exchange(own.tickets.at(param), {});
  std::exception_ptr failure;
  for (const CopyTicket ticket : tickets) {
    try {
      session_->chunks().copies().order(ticket, session_->memory().device().current_stream());
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (failure) {
    const MutexLock lock(mutex_);
    forget(own);
    std::rethrow_exception(failure);
  }
}

void ExpertCache::release(std::size_t layer) {
  Layer& own = layers_.at(layer);
  std::exception_ptr failure;
  for (std::size_t i = 0; i < own.params.size(); ++i) {
    try {
      await(layer, i);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  Dropped dropped;
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

void ExpertCache::drop(Layer& layer, Dropped& dropped) {
  figures_.cache_bytes -= layer.expert_at.size() * layer.expert_bytes;
  for (c10::Storage& storage : layer.storages) {
    dropped.push_back(std::move(storage));
  }
  forget(layer);
  layer.storages.clear();
  layer.expert_at.clear();
  layer.used.clear();
  layer.for_one_call = false;
}

void ExpertCache::clear() noexcept { static_cast<void>(give_up(~std::size_t{0})); }

bool ExpertCache::give_up(std::size_t bytes) noexcept {
  Dropped dropped;
  const MutexLock lock(mutex_);
  for (std::size_t freed = 0; freed < bytes;) {
    Layer* largest = nullptr;
    for (Layer& layer : layers_) {
      if (!layer.in_use && !layer.storages.empty() &&
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
