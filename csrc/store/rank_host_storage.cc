#include "store/rank_host_storage.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "ranks/shared_file.h"
#include "store/rank_host_bytes.h"

namespace castor {
namespace {

// Ranks that keep the parameters together; 1: each has its own.
std::size_t num_sharing(const SessionOptions& options) {
  const bool sharing = options.ranks && options.ranks->passes->node() && options.state.rule;
  return sharing ? options.ranks->passes->node()->size() : 1;
}

}  // namespace

RankHostStorage::RankHostStorage(const ChunkLayout& layout, std::span<const Placement> placements,
                                 const SessionOptions& options,
                                 const std::shared_ptr<MemoryTier>& host) {
  const std::size_t sharing = num_sharing(options);
  if (sharing == 1) {
    return;
  }
  nodes_ = options.ranks->passes->size() / sharing;
  const bool locked = options.backend->computes_by_itself();
  if ((nodes_ > 1 || locked) && options.zero_stage > 1) {
    refusal_ = "zero_stage=" + std::to_string(options.zero_stage) + " shards it over all ranks";
    return;
  }
  if (locked && nodes_ > 1) {
    refusal_ = "on GPUs of several machines each rank has its own, page-locked";
    return;
  }
  SharedHostStorage::LockPages lock_pages;
  if (locked) {
    lock_pages = [&](std::span<std::byte> pages) { return options.backend->lock_pages(pages); };
  }
  const RankHostBytes bytes = rank_host_bytes(layout, placements, options.ranks->passes->size(),
                                              sharing, reduced_on(options.ranks->sums.get()));
  std::string places;
  for (const std::size_t until : bytes.weights_until) {
    places += std::to_string(until) + ' ';
  }
  const std::size_t own = std::hash<std::string>()(places);
  for (const std::size_t other : gather(*options.ranks->passes, own)) {
    if (other != own) {
      refusal_ = "the ranks place chunks differently";
    }
  }
  const auto share = [&](Kind& kind, std::size_t all, std::size_t own_share,
                         const std::string& what) {
    if (all == 0 || !refusal_.empty()) {
      return;
    }
    NodeHostStorage shared = share_host_storage(*options.ranks->passes, sharing, all, lock_pages);
    refusal_ = std::move(shared.refusal);
    if (locked && !refusal_.empty()) {
      refusal_ = "each rank has its own, page-locked, as " + refusal_;
    }
    if (shared.storage) {
      kind.storage = std::move(shared.storage);
      kind.share = host->ledger().reserve(own_share, "this rank's share of the " + what +
                                                         " has no room there; raise host_memory, "
                                                         "or train a smaller model");
      kind.tier = std::make_shared<MemoryTier>(TierKind::kHost, all, kind.storage->make_arena());
    }
  };
  share(weights_, bytes.weights, bytes.weights_share, "parameters");
  share(gradients_, bytes.gradients, bytes.gradients_share, "gradients");
  if (!refusal_.empty()) {
    weights_ = {};
  } else if (gradients_.storage) {
    room_for_copies_ = bytes.room_for_copies;
  }
  if (locked && weights_.storage) {
    copies_ = std::make_shared<HostBlocks>(
        host,
        "a rank has values of its own, in a copy, until the ranks have brought theirs together; "
        "raise host_memory, or make chunks smaller (chunk_bytes)",
        HostBlocks::Account::kNobody, room_for_copies_);
  }
}

std::size_t RankHostStorage::bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Kind* const kind : {&weights_, &gradients_}) {
    bytes += kind->tier ? kind->tier->ledger().budget() : 0;
  }
  return bytes;
}

}  // namespace castor
