#include "ranks/rank_weights.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ranks/inter_node_group.h"

namespace castor {

void share_bytes(const SharedHostStorage& shared_storage, const Payload& weights,
                 std::span<const std::byte> own) {
  if (weights.away() || weights.has_copy()) {
    std::memcpy(shared_storage.common(weights.storage()) + (own.data() - weights.data()),
                own.data(), own.size());
  } else {
    shared_storage.publish(own);
  }
}

std::byte* RankWeights::begin_update(const Payload& weights) {
  if (!shared(weights) || weights.away()) {
    return weights.data();
  }
  share_own(weights);
  return shared_storage_->common(weights.storage());
}

void RankWeights::publish_copy(const Payload& weights) {
  if (shared(weights) && weights.has_copy()) {
    share_own(weights);
  }
}

void RankWeights::share_own(const Payload& weights) {
  if (staging_.staged(weights)) {
    staging_.bring(weights, shard_of(staging_.on_host(weights)));  // the common memory
  } else {
    share_bytes(*shared_storage_, weights, shard_of(weights));
  }
}

void RankWeights::gather(std::span<const Payload* const> weights) {
  const RankFigures::Timed timed(figures_);
  bool any_shared = false;
  for (const Payload* const one : weights) {
    if (!shared(*one)) {
      const bool for_good = staging_.staged(*one) && !one->away();
      if (gathers_ && all_true(*ranks_, for_good)) {
        staging_.await_stream(*one);
        gather_on_device(*one);
      } else {
        gather_shards(*one);
      }
      continue;
    }
    any_shared = true;
    if (one->away()) {
      share_own(*one);
    }
  }
  if (any_shared) {
    take_remote_shards(weights);
  }
}

// Kernels have written this rank's shard, and read no weights any more.
void RankWeights::gather_on_device(const Payload& weights) {
  gathers_->all_gather({weights.data(), weights.bytes()});
  figures_.add_bytes((ranks_->size() - 1) * (weights.bytes() / ranks_->size()));
}

void RankWeights::gather_shards(const Payload& weights) {
  const std::span<std::byte> all = staging_.on_host(weights);
  const std::span<std::byte> own = shard_of(all);
  staging_.bring(weights, own);
  ranks_->all_gather(own, all);
  const auto before = static_cast<std::size_t>(own.data() - all.data());
  staging_.send(weights, all.first(before));
  staging_.send(weights, all.subspan(before + own.size()));
  figures_.add_bytes((ranks_->size() - 1) * own.size());
}

void RankWeights::settle(std::span<const Payload* const> weights) {
  if (shared_storage_ == nullptr) {
    return;
  }
  for (const Payload* const one : weights) {
    if (shared(*one)) {
      share_own(*one);
    }
  }
  take_remote_shards(weights);
}

void RankWeights::take_remote_shards(std::span<const Payload* const> weights) {
  exchange_between_nodes(weights);
  std::vector<bool> on_devices(weights.size(), false);
  if (gathers_) {
    on_devices = on_all_devices(weights);
  } else {
    barrier(*ranks_->node());
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const Payload& one = *weights[i];
    if (on_devices[i]) {
      gather_on_device(one);
    } else if (shared(one)) {
      take_remote_shards(one);
    }
  }
}

std::vector<bool> RankWeights::on_all_devices(std::span<const Payload* const> weights) {
  std::vector<std::uint8_t> own(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    own[i] = static_cast<std::uint8_t>(shared(*weights[i]) && staging_.staged(*weights[i]));
  }
  std::vector<std::uint8_t> all(own.size() * ranks_->size());
  ranks_->all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(all)));
  std::vector<bool> everywhere(own.size(), true);
  for (std::size_t i = 0; i < all.size(); ++i) {
    everywhere[i % own.size()] = everywhere[i % own.size()] && all[i] != 0;
  }
  return everywhere;
}

// Each machine has all weights once, and its ranks' parts in them. What comes from another machine
// is written by the rank of the same place, where no other rank of this one writes.
void RankWeights::exchange_between_nodes(std::span<const Payload* const> weights) {
  const InterNodeGroup others(*ranks_);
  std::vector<PendingMessage> pending;
  for (std::size_t i = 0; i < weights.size() && others.num_nodes() > 1; ++i) {
    if (!shared(*weights[i])) {
      continue;
    }
    const std::size_t shard = weights[i]->bytes() / ranks_->size();
    std::byte* const common = shared_storage_->common(weights[i]->storage());
    const auto tag = static_cast<std::uint32_t>(i);
    others.for_each([&](std::size_t node) {
      pending.push_back(others.receive(node, tag, {common + others.rank_on(node) * shard, shard}));
      pending.push_back(others.send(node, tag, {common + ranks_->rank() * shard, shard}));
      figures_.add_crossed(shard);
    });
  }
  others.wait_all(pending);
}

// Those in common memory are what they should be.
void RankWeights::take_remote_shards(const Payload& weights) {
  if (!weights.away()) {
    shared_storage_->forget({weights.host_storage(), weights.bytes()});
    return;
  }
  const std::byte* const common = shared_storage_->common(weights.storage());
  const std::span<std::byte> own = shard_of(weights);
  const auto before = static_cast<std::size_t>(own.data() - weights.data());
  const std::size_t after = before + own.size();
  if (staging_.staged(weights)) {
    const std::span<const std::byte> all = staging_.on_host(weights);
    staging_.send(weights, all.first(before));
    staging_.send(weights, all.subspan(after));
    return;
  }
  std::memcpy(weights.data(), common, before);
  std::memcpy(weights.data() + after, common + after, weights.bytes() - after);
}

}  // namespace castor
